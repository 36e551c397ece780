"""From "these rows of that table" to checked Arrow tables, while the writer goes on.

A query plans with the newest index of each segment. If a file of the plan has gone meanwhile, because it was merged
into a larger one, the query lists again and plans again; what it has checked already it does not read twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from aggregator.history.chunks import ChunkReader, damaged
from aggregator.history.index import ChunkEntry
from aggregator.history.schema import SCHEMAS
from aggregator.history.snapshot import SegmentView, SnapshotReader
from telemetry.errors import HistoryError

__all__ = ["TableReader"]

_MAX_TRIES: Final = 100
_STEP_COLUMN: Final = {"sites": "first_step"}


@dataclass(frozen=True)
class TableReader:
    """Reads whole tables of a run.

    Attributes:
        run: the run directory.
        snapshots, chunks: what has been listed and checked so far.
    """

    run: Path
    snapshots: SnapshotReader
    chunks: ChunkReader

    def read(
        self,
        table: str,
        *,
        steps: range | None = None,
        site_ids: NDArray[np.uint64] | None = None,
        include_superseded: bool = False,
    ) -> pa.Table:
        """Return the rows of a table over all segments, in order, with the columns of its schema and ``segment``.

        Args:
            table: a name of ``SCHEMAS``.
            steps: only steps in this range.
            site_ids: only rows of these sites.
            include_superseded: also rows that a later segment supersedes; ``superseded`` marks them.

        Raises:
            HistoryDamagedError: bytes of the plan are not what was written, or are gone for good.
        """
        if steps is not None and not steps:
            return _joined(table, [])
        missing: tuple[Path, ChunkEntry] | None = None
        for _ in range(_MAX_TRIES):
            plan = tuple(_planned(self.snapshots.segments(self.run), table, steps))
            if missing is not None and any((view.folder, entry) == missing for view, entry in plan):
                raise damaged(*missing, "the file is missing")
            parts = []
            for view, entry in plan:
                try:
                    rows = self.chunks.read(view.folder, entry)
                except FileNotFoundError:
                    missing = view.folder, entry
                    break
                parts.append(_visible(rows, table, view, steps, site_ids, include_superseded))
            else:
                return _joined(table, parts)
        raise HistoryError(f"{self.run} changes faster than it can be read", remedy="read it again")


def _planned(
    views: tuple[SegmentView, ...], table: str, steps: range | None
) -> Iterator[tuple[SegmentView, ChunkEntry]]:
    for view in views:
        for entry in view.index.entries if view.index is not None else ():
            outside = steps is not None and (entry.step_lo > max(steps) or entry.step_hi < min(steps))
            if entry.table == table and not outside:
                yield view, entry


def _visible(
    rows: pa.Table,
    table: str,
    view: SegmentView,
    steps: range | None,
    site_ids: NDArray[np.uint64] | None,
    include_superseded: bool,
) -> pa.Table:
    step = rows[_STEP_COLUMN.get(table, "step")].to_numpy()
    superseded = np.zeros(len(step), bool) if view.end_step is None else step >= view.end_step
    keep = np.ones(len(step), bool) if include_superseded else ~superseded
    if steps is not None:
        keep &= np.isin(step, np.array(steps))
    if site_ids is not None:
        keep &= np.isin(rows["site"].to_numpy(), site_ids)
    extended = rows.append_column("segment", pa.array(np.full(len(step), view.number, np.int32)))
    extended = extended.append_column("superseded", pa.array(superseded))
    return extended if keep.all() else extended.filter(pa.array(keep))


def _joined(table: str, parts: list[pa.Table]) -> pa.Table:
    # Begins with the schema of this version: columns that older segments lack are null, and no rows have columns too.
    schema = SCHEMAS[table].append(pa.field("segment", pa.int32())).append(pa.field("superseded", pa.bool_()))
    return pa.concat_tables([schema.empty_table(), *parts], promote_options="default")
