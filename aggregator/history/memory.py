"""Recent steps in memory: a cache over the record on disk, or all there is where a run has no directory.

Memory is bounded, so without a directory something must give once it is full, and the caller says what: nothing (the
next due step is refused, with the remedies), the oldest steps (counted), or resolution (two neighbouring spans become
one, exactly, so that the whole run stays, ever coarser towards its beginning).
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import pyarrow as pa

from aggregator.history.index import ChunkEntry, ChunkFile, Index
from aggregator.history.plan import Query, TableReader, Views
from aggregator.history.series import drift_between, site_spec
from aggregator.history.snapshot import SegmentView
from aggregator.history.spans import as_span, merge_observations
from telemetry.errors import ConfigurationError
from telemetry.sites import SiteSpec

__all__ = [
    "DEFAULT_CAPACITY",
    "POLICIES",
    "MemoryTables",
    "MemoryView",
    "Policy",
    "RecentSteps",
    "StepSpan",
    "keep_recent",
    "recent_steps",
]

DEFAULT_CAPACITY: Final = 256
Policy = Literal["archived", "refuse", "drop_oldest", "coarsen"]
POLICIES: Final = ("archived", "refuse", "drop_oldest", "coarsen")
_ARCHIVED_BYTES: Final = 32 * 2**20
_MAX_FINDINGS: Final = 256


# Run directory → newest steps of the writer that this process has for it.
_caches: weakref.WeakValueDictionary[Path, RecentSteps] = weakref.WeakValueDictionary()


def keep_recent(run: Path, steps: RecentSteps) -> None:
    """Let readers of this process find the cache of a run, for as long as its writer holds it."""
    _caches[run.resolve()] = steps


def recent_steps(run: Path) -> RecentSteps | None:
    """Return the cache of a run that this process writes, None if it does not."""
    return _caches.get(run.resolve())


@dataclass(frozen=True, eq=False)
class StepSpan:
    """One step, or several merged as ranks are.

    Attributes:
        step_lo, step_hi: first and last step; num_steps: how many steps are in it.
        starts_series: whether a site became another thing at its first step, so that no earlier span may merge with it.
        tables: ``steps`` (one row, of the last step), ``observations`` (one row a site; of one step, with schema
            ``OBSERVATIONS``, of several ``SPAN_SCHEMA``) and ``findings``; encoded, so histograms are sparse.
    """

    step_lo: int
    step_hi: int
    num_steps: int
    starts_series: bool
    tables: Mapping[str, pa.Table]

    @property
    def num_bytes(self) -> int:
        """Memory of its observations, beside which the rest is small."""
        return int(self.tables["observations"].nbytes)

    def merge(self, later: StepSpan) -> StepSpan:
        """Return both in one; ``self`` comes first in the order of float additions. Counts are exact."""
        findings = pa.concat_tables([self.tables["findings"], later.tables["findings"]])
        earlier_rows, later_rows = (as_span(span.tables["observations"]) for span in (self, later))
        tables = {
            "steps": later.tables["steps"],
            "observations": merge_observations(earlier_rows, later_rows, later.step_hi),
            "findings": findings.slice(max(0, findings.num_rows - _MAX_FINDINGS)),
        }
        num_steps = self.num_steps + later.num_steps
        return StepSpan(self.step_lo, later.step_hi, num_steps, self.starts_series, tables)


@dataclass(frozen=True)
class MemoryView(SegmentView):
    """A segment in memory at one moment; ``tables`` are those of its index, by file and table."""

    tables: Mapping[str, Mapping[str, pa.Table]] = field(default_factory=dict)


class MemoryTables(TableReader):
    """Reads spans in memory as if they were files; the spans of a view stay, whatever becomes of the run."""

    def __init__(self, run: Path, steps: RecentSteps) -> None:
        super().__init__(run)
        self._steps = steps

    def views(self) -> Views:
        """Return the segments as they are now."""
        return self._steps.views(self.run)

    def prefetch(self, plan: Sequence[tuple[SegmentView, ChunkEntry]], query: Query) -> None:
        """Do nothing: all is in memory."""

    def stored(self, view: SegmentView, entry: ChunkEntry, query: Query) -> pa.Table:
        """Return the rows of a span, with all columns."""
        assert isinstance(view, MemoryView), "all views are of this reader"
        rows = view.tables[entry.file][entry.table]
        return as_span(rows) if entry.table == "observations" else rows


@dataclass
class _Segment:
    number: int
    record: Mapping[str, Any]
    spans: list[StepSpan] = field(default_factory=list)
    definitions: list[tuple[int, pa.Table]] = field(default_factory=list)
    sites: dict[int, SiteSpec] = field(default_factory=dict)
    num_commits: int = 0
    last_step: int | None = None
    sealed: bool = False


class RecentSteps:
    """The newest steps of a run, at most ``capacity`` spans of them. Safe to use from several threads.

    Attributes:
        capacity, policy: as given.
        num_dropped: steps that are no longer here; with an archive they are on disk.
        num_coarsened: spans that were merged into another.
    """

    def __init__(
        self, capacity: int = DEFAULT_CAPACITY, policy: Policy = "refuse", max_bytes: int = _ARCHIVED_BYTES
    ) -> None:
        """Begin empty.

        Args:
            capacity: spans to keep, at least 2.
            policy: ``archived`` where the record on disk has every step, so the oldest are let go; else ``refuse``,
                ``drop_oldest`` or ``coarsen``.
            max_bytes: of a cache over an archive; it keeps fewer spans if they are as large as this together.

        Raises:
            ConfigurationError: there is no such policy, or the capacity is less than 2.
        """
        if policy not in POLICIES or capacity < 2:
            raise ConfigurationError(
                f"capacity {capacity} with policy {policy!r}", remedy=f"keep 2 or more, under one of {POLICIES}"
            )
        self.capacity = capacity
        self.policy = policy
        self.num_dropped = 0
        self.num_coarsened = 0
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._segments: list[_Segment] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(len(segment.spans) for segment in self._segments)

    def __iter__(self) -> Iterator[StepSpan]:
        with self._lock:
            return iter([span for segment in self._segments for span in segment.spans])

    @property
    def is_full(self) -> bool:
        """Whether no further step can be kept; only under ``refuse``."""
        return self.policy == "refuse" and len(self) >= self.capacity

    def begin_segment(self, number: int, record: Mapping[str, Any]) -> None:
        """Take the steps that follow as those of a segment; ``record`` is its run record, as in ``segment.json``."""
        with self._lock:
            self._segments.append(_Segment(number, record))

    def seal(self) -> None:
        """Say that no step follows in the newest segment."""
        with self._lock:
            self._segments[-1].sealed = True

    def add(self, step: int, tables: Mapping[str, pa.Table]) -> None:
        """Keep a step; what gives way if memory is full, the policy says. Under ``refuse`` it must not be full.

        Args:
            step: its number, larger than the one before in its segment.
            tables: its rows by table, see :class:`aggregator.history.intake.Intake`.
        """
        assert not self.is_full, "the step before was the last that could be taken"
        with self._lock:
            if len(self) >= self.capacity:
                self._make_room()
            segment = self._segments[-1]
            starts_series = self._define(segment, step, tables["sites"])
            kept = {name: tables[name] for name in ("steps", "observations", "findings")}
            span = StepSpan(step, step, 1, starts_series, kept)
            segment.spans.append(span)
            segment.num_commits += 1
            segment.last_step = step
            self._num_bytes += span.num_bytes
            while self.policy == "archived" and self._num_bytes > self._max_bytes and len(self) > 1:
                self._drop_oldest()

    def views(self, run: Path) -> Views:
        """Return the segments as they are now, for a reader; ``run`` is how errors call the run."""
        with self._lock:
            views: list[MemoryView] = []
            end_step: int | None = None
            for segment in reversed(self._segments):
                views.append(self._view(segment, run, end_step))
                starts = segment.record["resume_step"]
                end_step = starts if end_step is None or (starts is not None and starts < end_step) else end_step
            return tuple(reversed(views))

    def _define(self, segment: _Segment, step: int, sites: pa.Table) -> bool:
        """Take definitions in; they stay, however many steps go. Tells whether a site has drifted."""
        if not sites.num_rows:
            return False
        segment.definitions.append((step, sites))
        drifted = False
        for row in sites.to_pylist():
            spec, known = site_spec(row), segment.sites.get(row["site"])
            drifted = drifted or (known is not None and bool(drift_between(known, spec)))
            segment.sites[row["site"]] = spec
        return drifted

    def _make_room(self) -> None:
        if self.policy == "coarsen":
            for segment in self._segments:
                before = len(segment.spans)
                segment.spans = _coarser(segment.spans)
                self.num_coarsened += before - len(segment.spans)
        if len(self) >= self.capacity:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        oldest = next(segment for segment in self._segments if segment.spans).spans.pop(0)
        self.num_dropped += oldest.num_steps
        self._num_bytes -= oldest.num_bytes

    def _view(self, segment: _Segment, run: Path, end_step: int | None) -> MemoryView:
        definitions = [(step, step, {"sites": sites}) for step, sites in segment.definitions]
        spans = [(span.step_lo, span.step_hi, span.tables) for span in segment.spans]
        tables = {str(seq): content for seq, (*_, content) in enumerate([*definitions, *spans])}
        files = tuple(
            ChunkFile(entries)
            for seq, (low, high, content) in enumerate([*definitions, *spans])
            if (entries := tuple(_entries(segment.number, seq, (low, high), content)))
        )
        start = segment.record["resume_step"]
        index = Index(segment.num_commits, segment.sealed, start, segment.last_step, segment.num_commits, files)
        return MemoryView(segment.number, run, segment.record, index, end_step, tables)


def _entries(segment: int, seq: int, steps: tuple[int, int], content: Mapping[str, pa.Table]) -> Iterator[ChunkEntry]:
    """Describe tables in memory as if they were in a file, whose name is the key of ``MemoryView.tables``."""
    for name, table in content.items():
        if table.num_rows:
            digest = hashlib.sha256(f"{segment} {seq} {steps} {name}".encode()).digest()
            yield ChunkEntry(name, str(seq), 0, table.nbytes, digest, table.num_rows, *steps, seq, seq)


def _coarser(spans: list[StepSpan]) -> list[StepSpan]:
    """Merge each two neighbours from the oldest on, but never over the end of a series."""
    merged: list[StepSpan] = []
    i = 0
    while i < len(spans):
        if i + 1 < len(spans) and not spans[i + 1].starts_series:
            merged.append(spans[i].merge(spans[i + 1]))
            i += 2
        else:
            merged.append(spans[i])
            i += 1
    return merged
