"""The record of a run as Arrow tables: what users, reports and tests read.

Any number of processes may read while one writes. Each call sees what is committed when it begins; every byte that it
returns was checked against the hash that the writer recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from aggregator.catalogue import MergedStep
from aggregator.health.update_ratio import UPDATE_TO_WEIGHT
from aggregator.history.coarsen import COARSE_FIELDS, coarsened
from aggregator.history.follow import Cursor, Followed, newest_cursor
from aggregator.history.losses import Loss, losses_table
from aggregator.history.memory import MemoryTables, recent_steps
from aggregator.history.memory_run import is_memory, memory_source
from aggregator.history.plan import Query, TableReader, Views
from aggregator.history.present import COLUMNS, DEFAULT_COLUMNS, OF_STEP, StepFacts, present, stored_columns
from aggregator.history.quantiles import quantile_rows, require_quantiles
from aggregator.history.replay import Replay
from aggregator.history.segments import segments_table
from aggregator.history.selection import as_names, matching, require_fields, select_series
from aggregator.history.series import SeriesCatalogue
from aggregator.history.snapshot import read_manifest, salvaged_manifest
from aggregator.history.update_ratio import ratio_series, require_update
from telemetry.errors import HistogramAbsentError, HistoryDamagedError, HistoryNotFoundError
from telemetry.summary import FLOAT_FIELDS, INT_FIELDS, SUMMARY_FIELDS, Histogram, HistogramDescriptor

__all__ = ["History", "open_history", "recent_history"]

Names = str | Iterable[str] | None
Steps = range | Iterable[int] | None


def open_history(path: Path | str, *, salvage: bool = False) -> History:
    """Open the record of a run for reading, while it is written or after.

    Args:
        path: the directory that was given to ``watch`` as ``to``, or ``memory://NAME`` in the process that writes it.
        salvage: read what is left of a damaged run instead of refusing; :meth:`History.losses` says what is missing.

    Raises:
        HistoryNotFoundError: there is no run.
        HistoryDamagedError: its manifest is damaged.
        HistoryVersionError: a newer version wrote it.

    Example:
        >>> history = open_history("runs/exp1")                                         # doctest: +SKIP
        >>> history.series("layers.0.attn", "activation", "rms").to_pandas().plot("step", "value")  # doctest: +SKIP
    """
    if is_memory(path):
        return History(*memory_source(path))
    run = Path(path)
    losses: list[Loss] | None = [] if salvage else None
    try:
        manifest = read_manifest(run)
    except HistoryDamagedError as error:
        if losses is None:
            raise
        losses.append(Loss(str(run), None, None, None, None, error.message))
        manifest = salvaged_manifest(run)
    return History(TableReader(run, losses), manifest)


def recent_history(path: Path | str) -> History:
    """Open the newest steps of a run that this very process writes, from memory: no file is read after the manifest.

    For live views beside the training, on rank zero. At most 256 durable steps are there, or as many as have 32 MiB;
    :func:`open_history` has all.

    Args:
        path: the directory that was given to ``watch`` as ``to``.

    Raises:
        HistoryNotFoundError: this process does not write it.
        HistoryDamagedError: its manifest is damaged.

    Example:
        >>> recent_history("runs/exp1").series("layers.0.attn", "activation", "rms")  # doctest: +SKIP
    """
    run = Path(path)
    steps = recent_steps(run)
    if steps is None:
        raise HistoryNotFoundError(
            f"this process writes no run in {run}", remedy="open_history reads it in any process"
        )
    return History(MemoryTables(run, steps), read_manifest(run))


class History:
    """A run. Made by :func:`open_history`; every method returns what is committed at its call.

    Where steps were replayed after a restart, tables have one row a step, that of the last attempt, unless
    ``include_superseded`` is asked for.

    Raises (all methods):
        HistoryDamagedError: bytes that were needed are not what was written; names the file and its steps.
        HistoryVersionError: a newer version wrote them.
    """

    def __init__(self, tables: TableReader, manifest: Mapping[str, Any]) -> None:
        self.path = tables.run
        self._manifest = manifest
        self._tables = tables
        self._salvage = tables.losses is not None
        self._catalogues: dict[bool, tuple[object, SeriesCatalogue]] = {}

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

    def losses(self) -> pa.Table:
        """Return what the calls so far had to leave out, for a run that was opened with ``salvage=True``.

        Columns ``file segment table step_lo step_hi problem``; steps are null where they cannot be told.
        """
        return losses_table(self._tables.losses or [])

    def segments(self) -> pa.Table:
        """Return one row a segment: who wrote it, from which step, how far, and whether it is sealed.

        Columns ``segment parent resume_step uuid started_unix_s host pid num_commits last_step end_step sealed run``;
        ``end_step`` is the first step that a later segment supersedes, ``run`` the run record as JSON.
        """
        return segments_table(self._tables.views())

    def sites(self, select: str | None = None) -> pa.Table:
        """Return one row a series in the order in which they were first seen.

        Args:
            select: a glob of names, for example ``"layers.*.attn"``.

        Columns ``site`` (name) ``kind series site_id dtype shape numel placements aliases estimated first_step
        ended_step ended_reason``. A site whose dtype, placement, number of elements or whole shape changes has several
        series, numbered from 0; all but the last say where and why they ended.
        """
        return matching(self._catalogue(self._tables.views()).table, select)

    def steps(self, *, include_superseded: bool = False) -> pa.Table:
        """Return one row a committed step: optimizer outcome, loss scale, mode, times in seconds, coverage."""
        return self._tables.read(Query("steps", include_superseded=include_superseded))

    def coverage(self) -> pa.Table:
        """Return, for each step, how many ranks are in it and who is missing.

        Columns ``step num_ranks world_size missing_ranks missing_reasons``.
        """
        columns = ["step", "num_ranks", "world_size", "missing_ranks", "missing_reasons"]
        return self._tables.read(Query("steps", columns)).select(columns)

    def findings(self) -> pa.Table:
        """Return what was found wrong: ``step code message rank site details segment``; ``details`` is JSON."""
        return self._tables.read(Query("findings")).drop_columns(["superseded"])

    def series(self, site: str, kind: str, field: str, *, steps: Steps = None, series: int | None = None) -> pa.Table:
        """Return one number over the steps.

        Args:
            site, kind: which site.
            field: any of ``telemetry.summary.SUMMARY_FIELDS``, for example ``rms``, ``nan`` or ``absmax``; of the kind
                ``update`` also ``update_to_weight``, the rms of the update over that of the parameter after it.
            steps: step numbers, as a range or one by one; None for all.
            series: which series of a site that has drifted, see :meth:`sites`; None for the last one.

        Returns:
            Columns ``step`` (int64) and ``value`` (int64 for a count, else float64), one row for each step at which
            the site was scheduled; null where there is no value: nothing was observed, or no element was finite.
            ``sum sum_sq sum_abs l2`` of a site that is sampled are estimates of the whole, and counts, extremes and
            central sums are those of the sample; the schema metadata ``estimated`` then says ``true``, and ``series``
            which series of how many it is.

        Raises:
            SiteUnknownError, KindUnknownError, FieldUnknownError: with near names.
        """
        require_fields([field], (*SUMMARY_FIELDS, UPDATE_TO_WEIGHT))
        if field == UPDATE_TO_WEIGHT:
            require_update(kind)
            parts = (self.series(site, one, "rms", steps=steps, series=series) for one in ("update", "parameter"))
            return ratio_series(*parts)
        views = self._tables.views()
        catalogue = self._catalogue(views)
        numbers = catalogue.table["series"].filter(
            pa.array(select_series(catalogue.table, as_names(site), as_names(kind)))
        )
        chosen = len(numbers) - 1 if series is None else series
        rows = self._read(["step", "estimated", "series", field], site, kind, steps, views=views)
        rows = rows.filter(pc.equal(rows["series"], chosen))
        metadata = {
            b"estimated": b"true" if pc.any(rows["estimated"]).as_py() else b"false",
            **({b"series": f"{chosen} of {len(numbers)}".encode()} if len(numbers) > 1 else {}),
        }
        return rows.select(["step", field]).rename_columns(["step", "value"]).replace_schema_metadata(metadata)

    def observations(
        self,
        sites: Names = None,
        kinds: Names = None,
        steps: Steps = None,
        columns: Sequence[str] | None = None,
        *,
        where: pc.Expression | None = None,
        include_superseded: bool = False,
    ) -> pa.Table:
        """Return one row for each scheduled observation, ordered by segment and step.

        Args:
            sites, kinds: names; None for all.
            steps: step numbers, as a range or one by one; None for all.
            columns: among the stored columns (``step segment site kind series estimated presence reason``, the counts
                and floats of a summary, ``num_scheduled num_observed num_contributing absmax_rank num_nonfinite_ranks
                first_nonfinite_rank replicas hist_bins hist_counts``), ``superseded``, ``mode`` of the step (``train``,
                ``eval``, or ``mixed`` over ranks), ``grad_scale`` (the loss scale of the step, for gradients), and any
                derived field; None for the stored ones. Sampled sites are scaled as in :meth:`series`.
            where: a condition on ``columns``, for example ``pyarrow.compute.field("nan") > 0``.
            include_superseded: also rows that a later attempt superseded.

        Raises:
            SiteUnknownError, KindUnknownError, FieldUnknownError: with near names.
        """
        rows = self._read(columns, sites, kinds, steps, include_superseded=include_superseded)
        return rows if where is None else rows.filter(where)

    def observation_batches(
        self,
        sites: Names = None,
        kinds: Names = None,
        steps: Steps = None,
        columns: Sequence[str] | None = None,
        *,
        where: pc.Expression | None = None,
        include_superseded: bool = False,
    ) -> pa.RecordBatchReader:
        """Return the rows of :meth:`observations` as a stream that holds one file of them at a time."""
        wanted, query, views = self._query(columns, sites, kinds, steps, include_superseded)
        catalogue, facts = self._catalogue(views, include_superseded), self._facts(wanted, query, views)
        schema = self._present(query.schema.empty_table(), catalogue, wanted, facts, steps).schema

        def batches() -> Iterator[pa.RecordBatch]:
            for part in self._tables.parts(query, views):
                rows = self._present(part, catalogue, wanted, facts, steps)
                yield from (rows if where is None else rows.filter(where)).cast(schema).to_batches()

        return pa.RecordBatchReader.from_batches(schema, batches())

    def merged_steps(self) -> Iterator[MergedStep]:
        """Yield the recorded steps as sinks receive them, ascending: to show a record elsewhere after its run.

        One file of the record is in memory at a time. Sampled sites are as they were counted, not scaled.
        """
        views = self._tables.views()
        replay = Replay(self.run_id, self.descriptor, self._catalogue(views))
        steps, findings = (self._tables.read(Query(table), views) for table in ("steps", "findings"))
        return replay.steps(steps, findings, self._tables.parts(Query("observations"), views))

    def histogram(self, site: str, kind: str, step: int) -> Histogram:
        """Return the histogram of a site at a step, counts exactly as merged.

        Raises:
            SiteUnknownError, KindUnknownError: with near names.
            HistogramAbsentError: there is none at this step.
        """
        for _, counts in self._histograms(site, kind, range(step, step + 1)):
            return Histogram(self.descriptor, counts)
        raise HistogramAbsentError(
            f"{kind} {site} has no histogram at step {step}",
            site=site,
            step=step,
            remedy="histograms are counted every `hist_every` steps; observations(columns=['step', 'hist_counts']) "
            "shows at which",
        )

    def quantiles(
        self, site: str, kind: str, quantiles: Sequence[float] = (0.01, 0.5, 0.99), *, steps: Steps = None
    ) -> pa.Table:
        """Return quantiles of a site at every step that has a histogram, each between two certain bounds.

        Columns ``step q value lower upper``; see :func:`aggregator.history.quantiles.quantile_rows` for the rule and
        the error. Null of a histogram without a value.

        Raises:
            SiteUnknownError, KindUnknownError: with near names.
            ConfigurationError: a quantile lies outside of [0, 1].
        """
        require_quantiles(quantiles)
        return quantile_rows(self._histograms(site, kind, steps), self.descriptor, quantiles)

    def coarsen(
        self,
        every: int,
        sites: Names = None,
        kinds: Names = None,
        steps: Steps = None,
        fields: Sequence[str] = (*INT_FIELDS, *FLOAT_FIELDS),
    ) -> pa.Table:
        """Return one row for each series and each ``every`` steps, merged as ranks are: counts exactly.

        Args:
            every: steps n·every to (n + 1)·every - 1 become one row.
            sites, kinds, steps: as for :meth:`observations`.
            fields: any of ``telemetry.summary.SUMMARY_FIELDS``.

        Returns:
            Columns ``site kind series step_lo step_hi num_steps num_observed_steps`` and ``fields``; ``step_lo`` and
            ``step_hi`` are the first and last step that is in the row.
        """
        require_fields(fields, COARSE_FIELDS)
        _, query, views = self._query(["step", "presence", *INT_FIELDS, *FLOAT_FIELDS], sites, kinds, steps, False)
        stored = _only(self._tables.read(query, views), steps)
        catalogue = self._catalogue(views)
        if self._salvage:
            catalogue = catalogue.with_unknown(stored["site"].to_numpy())
        return coarsened(stored, catalogue, every, fields)

    def follow(self, cursor: Cursor | None = None, columns: Sequence[str] | None = None) -> Followed:
        """Return all that was committed after ``cursor``, in the order of commits, and the cursor to go on with.

        A later attempt that supersedes steps comes as further rows with a greater ``segment``.

        Args:
            cursor: of the call before; None to begin with the first step.
            columns: of the observations, as for :meth:`observations`.
        """
        views = self._tables.views()
        after = None if cursor is None else (cursor.segment, cursor.step)

        def rows(table: str) -> pa.Table:
            return self._tables.read(Query(table, after=after, include_superseded=True), views)

        wanted, query, _ = self._query(columns, None, None, None, True, views)
        stored = self._tables.read(replace(query, after=after), views)
        catalogue = self._catalogue(views, True)
        observations = self._present(stored, catalogue, wanted, self._facts(wanted, query, views), None)
        return Followed(rows("steps"), observations, rows("findings"), newest_cursor(views, cursor))

    def _read(
        self,
        columns: Sequence[str] | None,
        sites: Names,
        kinds: Names,
        steps: Steps,
        *,
        include_superseded: bool = False,
        views: Views | None = None,
    ) -> pa.Table:
        wanted, query, views = self._query(columns, sites, kinds, steps, include_superseded, views)
        stored = self._tables.read(query, views)
        catalogue = self._catalogue(views, include_superseded)
        return self._present(stored, catalogue, wanted, self._facts(wanted, query, views), steps)

    def _query(
        self,
        columns: Sequence[str] | None,
        sites: Names,
        kinds: Names,
        steps: Steps,
        include_superseded: bool,
        views: Views | None = None,
    ) -> tuple[Sequence[str], Query, Views]:
        wanted = DEFAULT_COLUMNS if columns is None else tuple(columns)
        require_fields(wanted, COLUMNS)
        views = self._tables.views() if views is None else views
        site_ids = None
        if sites is not None or kinds is not None:
            table = self._catalogue(views, include_superseded).table
            chosen = select_series(table, as_names(sites), as_names(kinds))
            site_ids = np.unique(table["site_id"].to_numpy()[chosen])
        query = Query("observations", stored_columns(wanted), _as_range(steps), site_ids, include_superseded)
        return wanted, query, views

    def _present(
        self, stored: pa.Table, catalogue: SeriesCatalogue, columns: Sequence[str], facts: StepFacts, steps: Steps
    ) -> pa.Table:
        rows = _only(stored, steps)
        known = catalogue.with_unknown(rows["site"].to_numpy()) if self._salvage else catalogue
        return present(rows, known, columns, facts)

    def _facts(self, columns: Sequence[str], query: Query, views: Views) -> StepFacts:
        """Return what the steps of a query say for those columns that are theirs."""
        wanted = [name for name in OF_STEP if name in columns]
        if not wanted:
            return {}
        asked = Query("steps", ["step", *wanted], query.steps, None, query.include_superseded, query.after)
        steps = self._tables.read(asked, views)
        keys = list(zip(steps["segment"].to_pylist(), steps["step"].to_pylist(), strict=True))
        return {name: dict(zip(keys, steps[name].to_pylist(), strict=True)) for name in wanted}

    def _histograms(self, site: str, kind: str, steps: Steps) -> Iterator[tuple[int, NDArray[np.int64]]]:
        rows = self._read(["step", "hist_bins", "hist_counts"], site, kind, steps).drop_null()
        for row in rows.to_batches():
            for i in range(row.num_rows):
                counts = np.zeros(self.descriptor.num_counts, dtype=np.int64)
                counts[row["hist_bins"][i].values.to_numpy()] = row["hist_counts"][i].values.to_numpy()
                yield row["step"][i].as_py(), counts

    def _catalogue(self, views: Views, include_superseded: bool = False) -> SeriesCatalogue:
        key = tuple(
            (view.number, view.end_step, entry.sha256)
            for view in views
            if view.index is not None
            for entry in view.index.entries
            if entry.table == "sites"
        )
        kept = self._catalogues.get(include_superseded)
        if kept is None or kept[0] != key:
            stored = self._tables.read(Query("sites", include_superseded=include_superseded), views)
            kept = self._catalogues[include_superseded] = (key, SeriesCatalogue.of(stored.to_pylist()))
        return kept[1]


def _as_range(steps: Steps) -> range | None:
    if steps is None or isinstance(steps, range):
        return steps
    numbers = list(steps)
    return range(min(numbers), max(numbers) + 1) if numbers else range(0)


def _only(stored: pa.Table, steps: Steps) -> pa.Table:
    """Drop what lies between step numbers that were given one by one."""
    if steps is None or isinstance(steps, range):
        return stored
    return stored.filter(pa.array(np.isin(stored["step"].to_numpy(), list(steps))))
