"""From "these rows of that table" to checked Arrow tables, while the writer goes on.

A query plans with the newest index of each segment. If a file of the plan has gone meanwhile, because it was folded
into a larger one, the query lists again and goes on where it was. It returns no more than was committed at its start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from aggregator.history.chunks import ChunkReader
from aggregator.history.damage import MISSING, damaged
from aggregator.history.index import ChunkEntry
from aggregator.history.losses import Loss
from aggregator.history.parquet import ParquetReader
from aggregator.history.schema import SCHEMAS, SPANS
from aggregator.history.snapshot import SegmentView, SnapshotReader
from telemetry.errors import HistoryDamagedError, HistoryError

__all__ = ["Query", "TableReader"]

_MAX_TRIES: Final = 100
_STEP_COLUMN: Final = {"sites": "first_step"}
_BEFORE_ALL: Final = -(2**63)
_AFTER_ALL: Final = 2**63 - 1
_EXTRA: Final = pa.schema([pa.field("segment", pa.int32()), pa.field("superseded", pa.bool_())])

Views = tuple[SegmentView, ...]


@dataclass(frozen=True)
class Query:
    """Which rows of which table.

    Attributes:
        table: a name of ``SCHEMAS``.
        columns: stored columns to return, None for all; ``segment`` and ``superseded`` come with them.
        steps: only steps in this range.
        site_ids: only rows of these sites, ascending.
        include_superseded: also rows that a later segment supersedes.
        after: only rows after this (segment, step).
    """

    table: str
    columns: Sequence[str] | None = None
    steps: range | None = None
    site_ids: NDArray[np.uint64] | None = None
    include_superseded: bool = False
    after: tuple[int, int] | None = None

    @property
    def step_column(self) -> str:
        """Column that holds the step."""
        return _STEP_COLUMN.get(self.table, "step")

    @cached_property
    def needed(self) -> list[str]:
        """Stored columns that have to be read, in their order."""
        stored = SCHEMAS[self.table].names
        needed = {*(stored if self.columns is None else self.columns), self.step_column}
        if self.site_ids is not None:
            needed.add("site")
        return [name for name in stored if name in needed]

    @cached_property
    def schema(self) -> pa.Schema:
        """Of what is returned."""
        stored = SCHEMAS[self.table]
        chosen = [stored.field(name) for name in (self.columns if self.columns is not None else stored.names)]
        return pa.schema([*chosen, *_EXTRA])


class TableReader:
    """Reads tables of a run, each range checked before it is parsed.

    Attributes:
        run: the run directory.
        losses: None to refuse damage; else it is noted there, and the rest is read.
    """

    def __init__(self, run: Path, losses: list[Loss] | None = None) -> None:
        self.run = run
        self.losses = losses
        self._snapshots = SnapshotReader(losses)
        self._chunks = ChunkReader()
        self._parquet = ParquetReader(self._chunks)

    def views(self) -> Views:
        """Return the segments as they are now; see :meth:`aggregator.history.snapshot.SnapshotReader.segments`."""
        return self._snapshots.segments(self.run)

    def read(self, query: Query, views: Views | None = None) -> pa.Table:
        """Return the rows over all segments, in order of segment and step.

        Args:
            query: which rows.
            views: what counts as committed; None for what is now.

        Raises:
            HistoryDamagedError: bytes of the plan are not what was written, or are gone for good.
        """
        # Begins with the schema of this version: columns that older segments lack are null, and no rows have columns.
        parts = [query.schema.empty_table(), *self.parts(query, views)]
        return pa.concat_tables(parts, promote_options="default")

    def parts(self, query: Query, views: Views | None = None) -> Iterator[pa.Table]:
        """Yield the same rows file by file, so that no more than one file of them is in memory."""
        if query.steps is not None and not query.steps:
            return
        begun = self.views() if views is None else views
        done: dict[int, int] = {}
        missing: tuple[SegmentView, ChunkEntry] | None = None
        current = begun
        for _ in range(_MAX_TRIES):
            plan = [
                pair
                for pair in _planned(begun, current, query)
                if pair[1].step_hi > done.get(pair[0].number, _BEFORE_ALL)
            ]
            if missing is not None and any(_same(missing, pair) for pair in plan):
                self._note(*missing, damaged(missing[0].folder, missing[1], MISSING))
                done[missing[0].number] = missing[1].step_hi
                plan = [pair for pair in plan if not _same(missing, pair)]
            self.prefetch(plan, query)
            for view, entry in plan:
                try:
                    rows = self._part(view, entry, query, done.get(view.number, _BEFORE_ALL))
                except FileNotFoundError:
                    missing = view, entry
                    break
                except HistoryDamagedError as error:
                    self._note(view, entry, error)
                    rows = None
                done[view.number] = entry.step_hi
                if rows is not None and rows.num_rows:
                    yield rows
            else:
                return
            current = self.views()
        raise HistoryError(f"{self.run} changes faster than it can be read", remedy="read it again")

    def _note(self, view: SegmentView, entry: ChunkEntry, error: HistoryDamagedError) -> None:
        if self.losses is None:
            raise error
        file = str(view.folder / entry.file)
        self.losses.append(Loss(file, view.number, entry.table, entry.step_lo, entry.step_hi, error.message))

    def _part(self, view: SegmentView, entry: ChunkEntry, query: Query, after: int) -> pa.Table:
        rows = self.stored(view, entry, query)
        step = rows[query.step_column].to_numpy()
        superseded = np.zeros(len(step), bool) if view.end_step is None else step >= view.end_step
        keep = (step <= _last_step(view)) & (step > max(after, _bound(query, view)))
        if not query.include_superseded:
            keep &= ~superseded
        if query.steps is not None:
            keep &= _inside(step, query.steps)
        if query.site_ids is not None:
            keep &= np.isin(rows["site"].to_numpy(), query.site_ids)
        chosen = np.flatnonzero(keep)
        if np.any(np.diff(step[chosen]) < 0):  # Folded files are sorted by site.
            chosen = chosen[np.argsort(step[chosen], kind="stable")]
        names = [name for name in (*query.schema.names, *SPANS.names) if name in rows.column_names]
        taken = rows.select(names) if len(chosen) == len(step) and not entry.level else rows.select(names).take(chosen)
        taken = taken.append_column("segment", pa.array(np.full(len(chosen), view.number, np.int32)))
        return taken.append_column("superseded", pa.array(superseded[chosen]))

    def stored(self, view: SegmentView, entry: ChunkEntry, query: Query) -> pa.Table:
        """Return the rows of one file, at least those that the query asks for, with the columns that it needs."""
        if entry.group_site_starts is None:
            rows = self._chunks.read(view.folder, entry)
            return rows.select([name for name in rows.column_names if name in query.needed])
        return self._parquet.read(view.folder, entry, _checksums(view, entry), query.needed, query.site_ids)

    def prefetch(self, plan: Sequence[tuple[SegmentView, ChunkEntry]], query: Query) -> None:
        """Let the operating system read what a plan needs side by side: the files, then the columns of few sites.

        What is wrong with a file is found by whoever reads it.
        """
        if len(plan) < 2:
            return
        folded = [(view, entry) for view, entry in plan if entry.group_site_starts is not None]
        for view, entry in plan:
            self._chunks.prefetch(view.folder, entry)
        for view, entry in folded if query.site_ids is not None else ():
            assert query.site_ids is not None
            with suppress(FileNotFoundError, HistoryDamagedError):
                self._parquet.prefetch(view.folder, entry, _checksums(view, entry), query.needed, query.site_ids)


def _checksums(view: SegmentView, entry: ChunkEntry) -> ChunkEntry:
    """Return the entry of the checksums of a Parquet file."""
    assert view.index is not None, "an entry stands in an index"
    checksums = view.index.companion(entry, "checksums")
    if checksums is None:
        raise damaged(view.folder, entry, "the index does not list its checksums")
    return checksums


def _planned(begun: Views, current: Views, query: Query) -> Iterator[tuple[SegmentView, ChunkEntry]]:
    """Pair the files of now with the segments as they were when the query began."""
    now = {view.number: view for view in current}
    for start in begun:
        view = now.get(start.number)
        if start.index is None or view is None or view.index is None:
            continue
        # Which steps count is decided by the start; which files hold them, by the newest index.
        index = replace(view.index, last_step=start.index.last_step)
        bounded = replace(start, index=index)
        for entry in view.index.entries:
            if entry.table == query.table and _may_have(entry, bounded, query):
                yield bounded, entry


def _may_have(entry: ChunkEntry, view: SegmentView, query: Query) -> bool:
    steps, sites = query.steps, query.site_ids
    if steps is not None and (entry.step_lo > max(steps[0], steps[-1]) or entry.step_hi < min(steps[0], steps[-1])):
        return False
    if not query.include_superseded and view.end_step is not None and entry.step_lo >= view.end_step:
        return False
    if entry.step_hi <= _bound(query, view):
        return False
    if sites is None or entry.site_lo is None or entry.site_hi is None:
        return True
    first = np.searchsorted(sites, np.uint64(entry.site_lo))
    return bool(first < len(sites) and sites[first] <= np.uint64(entry.site_hi))


def _bound(query: Query, view: SegmentView) -> int:
    """Return the step after which rows of this segment are asked for."""
    if query.after is None or view.number > query.after[0]:
        return _BEFORE_ALL
    return query.after[1] if view.number == query.after[0] else _AFTER_ALL


def _last_step(view: SegmentView) -> int:
    newest = view.index.last_step if view.index is not None else None
    return _BEFORE_ALL if newest is None else newest


def _inside(step: NDArray[np.int64], steps: range) -> NDArray[np.bool_]:
    low, high = min(steps[0], steps[-1]), max(steps[0], steps[-1])
    chosen: NDArray[np.bool_] = (step >= low) & (step <= high) & ((step - steps[0]) % steps.step == 0)
    return chosen


def _same(a: tuple[SegmentView, ChunkEntry], b: tuple[SegmentView, ChunkEntry]) -> bool:
    return (a[0].number, a[1].file, a[1].offset) == (b[0].number, b[1].file, b[1].offset)
