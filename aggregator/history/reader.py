"""The record of a run as Arrow tables: what users, reports and tests read.

Any number of processes may read while one writes. Each call sees what is committed when it begins; every byte that it
returns was checked against the hash that the writer recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from aggregator.estimates import NOT_ESTIMATED
from aggregator.history.chunks import ChunkReader
from aggregator.history.plan import TableReader
from aggregator.history.schema import OBSERVATIONS, PRESENCE_LABELS
from aggregator.history.selection import as_names, require_fields, select_sites
from aggregator.history.snapshot import SnapshotReader, read_manifest
from aggregator.history.values import float_values, packed_rows
from aggregator.strict_json import to_strict_json
from telemetry.errors import HistogramAbsentError
from telemetry.presence import Presence
from telemetry.summary import DERIVED_FIELDS, FLOAT_FIELDS, SUMMARY_FIELDS, Histogram, HistogramDescriptor

__all__ = ["History", "open_history"]

_LABELS = pa.array(PRESENCE_LABELS, pa.string())
_FLOATS = frozenset((*FLOAT_FIELDS, *DERIVED_FIELDS))
_DEFAULT_COLUMNS = ("step", "segment", "site", "kind", "estimated", *OBSERVATIONS.names[2:])
_COLUMNS = (*_DEFAULT_COLUMNS, "superseded", *DERIVED_FIELDS)


def open_history(path: Path | str) -> History:
    """Open the record of a run for reading, while it is written or after.

    Args:
        path: the directory that was given to ``watch`` as ``to``.

    Raises:
        HistoryNotFoundError: there is no run.
        HistoryDamagedError: its manifest is damaged.
        HistoryVersionError: a newer version wrote it.

    Example:
        >>> history = open_history("runs/exp1")                                         # doctest: +SKIP
        >>> history.series("layers.0.attn", "activation", "rms").to_pandas().plot("step", "value")  # doctest: +SKIP
    """
    return History(Path(path))


class History:
    """A run. Made by :func:`open_history`; every method returns what is committed at its call.

    Where steps were replayed after a restart, tables have one row a step, that of the last attempt, unless
    ``include_superseded`` is asked for.

    Raises (all methods):
        HistoryDamagedError: bytes that were needed are not what was written; names the file and its steps.
        HistoryVersionError: a newer version wrote them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._manifest = read_manifest(path)
        self._snapshots = SnapshotReader()
        self._tables = TableReader(path, self._snapshots, ChunkReader())

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The immutable record of the run: format, run id, run record, histogram descriptor, vocabularies."""
        return self._manifest

    @property
    def run_id(self) -> str:
        """Identity of the run over all its segments."""
        return str(self._manifest["run_id"])

    @property
    def descriptor(self) -> HistogramDescriptor:
        """Grid of every histogram of the run."""
        return HistogramDescriptor.from_wire(self._manifest["descriptor"])

    def segments(self) -> pa.Table:
        """Return one row a segment: who wrote it, from which step, how far, and whether it is sealed.

        Columns ``segment parent resume_step uuid started_unix_s host pid num_commits last_step end_step sealed run``;
        ``end_step`` is the first step that a later segment supersedes, ``run`` the run record as JSON.
        """
        rows = []
        for view in self._snapshots.segments(self.path):
            index = view.index
            rows.append(
                {
                    **{name: view.record[name] for name in _SEGMENTS.names if name in view.record},
                    "num_commits": index.num_commits if index else 0,
                    "last_step": index.last_step if index else None,
                    "end_step": view.end_step,
                    "sealed": index.sealed if index else False,
                    "run": to_strict_json(view.record["run"]),
                }
            )
        return pa.Table.from_pylist(rows, schema=_SEGMENTS)

    def sites(self) -> pa.Table:
        """Return one row a site in the order in which they were first seen.

        Columns ``site`` (name) ``kind site_id dtype shape numel placements aliases estimated first_step``.
        """
        stored = self._tables.read("sites")
        first: dict[int, int] = {}
        newest: dict[int, dict[str, Any]] = {}
        for row in stored.to_pylist():
            site_id = row["site"]
            first[site_id] = min(first.get(site_id, row["first_step"]), row["first_step"])
            newest[site_id] = {**row, "site_id": site_id, "site": row["name"], "first_step": first[site_id]}
        return pa.Table.from_pylist(list(newest.values()), schema=_SITES)

    def steps(self, *, include_superseded: bool = False) -> pa.Table:
        """Return one row a committed step: optimizer outcome, loss scale, mode, times in seconds, coverage."""
        return self._tables.read("steps", include_superseded=include_superseded)

    def coverage(self) -> pa.Table:
        """Return, for each step, how many ranks are in it and who is missing.

        Columns ``step num_ranks world_size missing_ranks missing_reasons``.
        """
        return self.steps().select(["step", "num_ranks", "world_size", "missing_ranks", "missing_reasons"])

    def findings(self) -> pa.Table:
        """Return what was found wrong: ``step code message rank site details segment``; ``details`` is JSON."""
        return self._tables.read("findings").drop_columns(["superseded"])

    def series(self, site: str, kind: str, field: str) -> pa.Table:
        """Return one number over the steps.

        Args:
            site, kind: which site.
            field: any of ``telemetry.summary.SUMMARY_FIELDS``, for example ``rms``, ``nan`` or ``absmax``.

        Returns:
            Columns ``step`` (int64) and ``value`` (int64 for a count, else float64), one row for each step at which
            the site was scheduled; null where there is no value: nothing was observed, or no element was finite.
            ``sum sum_sq sum_abs l2`` of a site that is sampled are estimates of the whole, and counts, extremes and
            central sums are those of the sample; the schema metadata ``estimated`` then says ``true``.

        Raises:
            SiteUnknownError, KindUnknownError, FieldUnknownError: with near names.
        """
        require_fields([field], SUMMARY_FIELDS)
        rows = self.observations(sites=site, kinds=kind, columns=["step", "estimated", field])
        estimated = b"true" if any(rows["estimated"].to_pylist()) else b"false"
        renamed = rows.select(["step", field]).rename_columns(["step", "value"])
        return renamed.replace_schema_metadata({b"estimated": estimated})

    def observations(
        self,
        sites: str | Iterable[str] | None = None,
        kinds: str | Iterable[str] | None = None,
        steps: range | Iterable[int] | None = None,
        columns: Sequence[str] | None = None,
        *,
        include_superseded: bool = False,
    ) -> pa.Table:
        """Return one row for each scheduled observation, ordered by segment and step.

        Args:
            sites, kinds: names; None for all.
            steps: step numbers, as a range or one by one; None for all.
            columns: among the stored columns (``step segment site kind estimated presence reason``, the counts and
                floats of a summary, ``num_scheduled num_observed num_contributing absmax_rank num_nonfinite_ranks
                first_nonfinite_rank hist_bins hist_counts``), ``superseded``, and any derived field; None for the
                stored ones. Sampled sites are scaled as in :meth:`series`.
            include_superseded: also rows that a later attempt superseded.

        Raises:
            SiteUnknownError, KindUnknownError, FieldUnknownError: with near names.
        """
        wanted = _DEFAULT_COLUMNS if columns is None else tuple(columns)
        require_fields(wanted, _COLUMNS)
        catalogue = self.sites()
        chosen = select_sites(catalogue, as_names(sites), as_names(kinds))
        every_site = sites is None and kinds is None
        stored = self._tables.read(
            "observations",
            steps=_as_range(steps),
            site_ids=None if every_site else catalogue["site_id"].to_numpy()[chosen],
            include_superseded=include_superseded,
        )
        if steps is not None and not isinstance(steps, range):
            stored = stored.filter(pa.array(np.isin(stored["step"].to_numpy(), list(steps))))
        return _presented(stored, catalogue, wanted)

    def histogram(self, site: str, kind: str, step: int) -> Histogram:
        """Return the histogram of a site at a step, counts exactly as merged.

        Raises:
            SiteUnknownError, KindUnknownError: with near names.
            HistogramAbsentError: there is none at this step.
        """
        row = self.observations(site, kind, range(step, step + 1), ["hist_bins", "hist_counts"]).drop_null()
        descriptor = self.descriptor
        if row.num_rows == 0:
            raise HistogramAbsentError(
                f"{kind} {site} has no histogram at step {step}",
                site=site,
                step=step,
                remedy="histograms are counted every `hist_every` steps; observations(columns=['step', 'hist_counts']) "
                "shows at which",
            )
        counts = np.zeros(descriptor.num_counts, dtype=np.int64)
        counts[row["hist_bins"][0].values.to_numpy()] = row["hist_counts"][0].values.to_numpy()
        return Histogram(descriptor, counts)


_SEGMENTS = pa.schema(
    [
        ("segment", pa.int32()),
        ("parent", pa.int32()),
        ("resume_step", pa.int64()),
        ("uuid", pa.string()),
        ("started_unix_s", pa.float64()),
        ("host", pa.string()),
        ("pid", pa.int64()),
        ("num_commits", pa.int64()),
        ("last_step", pa.int64()),
        ("end_step", pa.int64()),
        ("sealed", pa.bool_()),
        ("run", pa.string()),
    ]
)

_SITES = pa.schema(
    [
        ("site", pa.string()),
        ("kind", pa.string()),
        ("site_id", pa.uint64()),
        ("dtype", pa.string()),
        ("shape", pa.list_(pa.int64())),
        ("numel", pa.int64()),
        ("placements", pa.list_(pa.struct([("axis", pa.string()), ("placement", pa.string())]))),
        ("aliases", pa.list_(pa.string())),
        ("estimated", pa.bool_()),
        ("first_step", pa.int64()),
    ]
)


def _as_range(steps: range | Iterable[int] | None) -> range | None:
    if steps is None or isinstance(steps, range):
        return steps
    numbers = list(steps)
    return range(min(numbers), max(numbers) + 1) if numbers else range(0)


def _presented(stored: pa.Table, catalogue: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Give the stored rows the names, labels and numbers that ``columns`` ask for."""
    where = _positions(stored["site"].to_numpy(), catalogue["site_id"].to_numpy())
    presence = stored["presence"].to_numpy()
    estimated = catalogue["estimated"].to_numpy()[where]
    numel = np.where(estimated, catalogue["numel"].to_numpy()[where].astype(np.float64), NOT_ESTIMATED)
    packed = packed_rows(stored) if _FLOATS.intersection(columns) else None

    def column(name: str) -> Any:
        if name in ("site", "kind"):
            return pa.DictionaryArray.from_arrays(pa.array(where.astype(np.int32)), catalogue[name].combine_chunks())
        if name == "presence":
            return pa.DictionaryArray.from_arrays(pa.array(presence.astype(np.int32)), _LABELS)
        if name == "estimated":
            return pa.array(estimated)
        if name in _FLOATS:
            assert packed is not None
            return float_values(name, *packed, presence == Presence.OBSERVED, numel)
        return stored[name]

    return pa.table({name: column(name) for name in columns})


def _positions(site_ids: NDArray[np.uint64], catalogue: NDArray[np.uint64]) -> NDArray[np.intp]:
    order = np.argsort(catalogue)
    return order[np.searchsorted(catalogue, site_ids, sorter=order)]
