"""Every field of every site over time as arrays: what heat maps, profiles and ratios are drawn from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from aggregator.health.update_ratio import UPDATE_TO_WEIGHT, ratio_of
from aggregator.history import History
from aggregator.history.selection import require_fields
from aggregator.report.order import depth_order
from telemetry.errors import KindUnknownError
from telemetry.summary import SUMMARY_FIELDS

__all__ = ["NONFINITE", "REPORT_FIELDS", "CellState", "Grid", "Progress", "Spans", "read_grid", "time_spans"]

NONFINITE: Final = "nonfinite"
"""Name of the count of NaN and ±inf together, as a field of a grid."""

REPORT_FIELDS: Final = (*SUMMARY_FIELDS, NONFINITE, UPDATE_TO_WEIGHT)
"""All fields that a grid can have; ``update_to_weight`` of the kind ``update`` alone."""

Progress = Callable[[str, float], None]
"""Called with what is being done, and which share of all is done (0 to 1)."""

_MAX_ROWS: Final = 100_000
_COUNTS: Final = ("total", "finite", "nan", "pos_inf", "neg_inf")


class CellState(IntEnum):
    """What stands behind one cell: missing, empty and non-finite are never shown as a number."""

    NOT_SCHEDULED = 0
    """No observation was due."""
    OBSERVED = 1
    """All elements were finite."""
    MISSING = 2
    """Scheduled, but not one step of the cell was observed."""
    SOME_NONFINITE = 3
    """Observed with NaN or infinity among the elements; the value is that of the finite ones."""
    ALL_NONFINITE = 4
    """Observed, and no element was finite."""
    EMPTY = 5
    """Observed, and there were no elements."""


@dataclass(frozen=True)
class Spans:
    """How the steps of a run become columns.

    Attributes:
        every: width of a column in steps; 1 shows each step as it is.
        num_steps: committed steps of the run.
    """

    every: int
    num_steps: int


@dataclass(frozen=True, eq=False)
class Grid:
    """All series of one kind, from input to output, over time.

    Attributes:
        kind: of the sites.
        names: one a row; a site that has drifted has one row a series, marked ``#0``, ``#1``, ….
        is_matrix: bool ``[rows]``, whether the site has two dimensions or more.
        step_lo, step_hi: int64 ``[columns]``, first and last step that a column holds.
        state: uint8 ``[rows, columns]``, codes of :class:`CellState`.
        fields: field → float64 ``[rows, columns]``, NaN where there is no number; ``state`` says why.
    """

    kind: str
    names: tuple[str, ...]
    is_matrix: NDArray[np.bool_]
    step_lo: NDArray[np.int64]
    step_hi: NDArray[np.int64]
    state: NDArray[np.uint8]
    fields: dict[str, NDArray[np.float64]]

    @property
    def centers(self) -> NDArray[np.float64]:
        """Middle of each column in steps, ``[columns]``."""
        return (self.step_lo + self.step_hi) / 2

    @property
    def edges(self) -> NDArray[np.float64]:
        """Edges of the columns in steps, ``[columns + 1]``, half way between neighbours."""
        if not len(self.step_lo):
            return np.zeros(1)
        inner = (self.step_hi[:-1] + self.step_lo[1:]) / 2
        width = float(np.median(np.diff(self.centers))) if len(self.step_lo) > 1 else 1.0
        ends = self.centers[0] - width / 2, self.centers[-1] + width / 2
        return np.concatenate(([ends[0]], inner, [ends[1]]))

    def span(self, column: int) -> str:
        """Return the column as words: ``step 5`` or ``steps 5–9``."""
        low, high = int(self.step_lo[column]), int(self.step_hi[column])
        return f"step {low}" if low == high else f"steps {low}–{high}"


def time_spans(history: History, max_columns: int) -> Spans:
    """Return the narrowest columns of which a chart needs at most ``max_columns``."""
    steps = history.steps()["step"].to_numpy()
    every = 1 if len(steps) <= max_columns else -(-int(steps[-1] - steps[0] + 1) // max_columns)
    return Spans(every, len(steps))


def read_grid(
    history: History,
    kind: str,
    fields: Sequence[str] = ("rms",),
    *,
    every: int = 1,
    progress: Progress | None = None,
) -> Grid:
    """Read one kind of sites, merging ``every`` steps into a column exactly as ranks are merged.

    Reads some sites at a time, so that never more than about 100,000 rows of the record are in memory.

    Args:
        history: an open run.
        kind: of the sites.
        fields: among ``REPORT_FIELDS``.
        every: steps n·every to (n + 1)·every - 1 become a column.
        progress: told after each read.

    Raises:
        FieldUnknownError: with near names.
        KindUnknownError: the record has no site of this kind.
    """
    require_fields(fields, REPORT_FIELDS)
    table = history.sites()
    rows = table.filter(pc.equal(table["kind"], kind)).to_pylist()
    if not rows:
        known = sorted(set(table["kind"].to_pylist()))
        raise KindUnknownError(f"the record has no kind {kind!r}; there are {known}", remedy="use one of them")
    executed = table.filter(pc.equal(table["kind"], "activation"))["site"].to_pylist()
    order = depth_order(list(dict.fromkeys(row["site"] for row in rows)), list(dict.fromkeys(executed)))
    place = {name: i for i, name in enumerate(order)}
    rows.sort(key=lambda row: (place[row["site"]], row["series"]))
    parts = _parts(history, kind, order, fields, every, progress)
    grid = _scattered(kind, rows, pa.concat_tables(parts), fields, every)
    if UPDATE_TO_WEIGHT in fields and kind == "update":
        grid.fields[UPDATE_TO_WEIGHT] = _update_to_weight(history, grid, every)
    return grid


def _parts(
    history: History, kind: str, order: Sequence[str], fields: Sequence[str], every: int, progress: Progress | None
) -> list[pa.Table]:
    stored = [field for field in fields if field in SUMMARY_FIELDS]
    asked = tuple(dict.fromkeys((*_COUNTS, *stored, "rms")))
    at_once = max(1, _MAX_ROWS // max(1, history.steps().num_rows))
    parts = []
    for begin in range(0, len(order), at_once):
        parts.append(history.coarsen(every, order[begin : begin + at_once], kind, fields=asked))
        if progress is not None:
            progress(f"reading {kind}", min(1.0, (begin + at_once) / len(order)))
    return parts


def _scattered(
    kind: str, rows: Sequence[dict[str, object]], table: pa.Table, fields: Sequence[str], every: int
) -> Grid:
    lo, hi = table["step_lo"].to_numpy(), table["step_hi"].to_numpy()
    spans, columns = np.unique(lo // every, return_inverse=True)
    step_lo, step_hi = np.full(len(spans), np.iinfo(np.int64).max), np.full(len(spans), np.iinfo(np.int64).min)
    np.minimum.at(step_lo, columns, lo)
    np.maximum.at(step_hi, columns, hi)
    several = {row["site"] for row in rows if row["series"]}
    places = {(row["site"], row["series"]): i for i, row in enumerate(rows)}
    keys = zip(table["site"].to_pylist(), table["series"].to_pylist(), strict=True)
    at = np.array([places[key] for key in keys], np.intp), columns

    def scattered(values: NDArray[np.float64]) -> NDArray[np.float64]:
        out = np.full((len(rows), len(spans)), np.nan)
        out[at] = values
        return out

    named = {name: _floats(table[name]) for name in table.column_names if name in SUMMARY_FIELDS}
    named[NONFINITE] = named["nan"] + named["pos_inf"] + named["neg_inf"]
    state = np.zeros((len(rows), len(spans)), np.uint8)
    state[at] = _states(table["num_observed_steps"].to_numpy(), named)
    shapes = [row["shape"] for row in rows]
    return Grid(
        kind=kind,
        names=tuple(f"{row['site']} #{row['series']}" if row["site"] in several else str(row["site"]) for row in rows),
        is_matrix=np.array([isinstance(shape, list) and len(shape) >= 2 for shape in shapes], bool),
        step_lo=step_lo,
        step_hi=step_hi,
        state=state,
        fields={name: scattered(named[name]) for name in ("rms", *fields) if name in named},
    )


def _states(num_observed: NDArray[np.int64], named: dict[str, NDArray[np.float64]]) -> NDArray[np.uint8]:
    return np.select(
        [num_observed == 0, named["total"] == 0, named["finite"] == 0, named[NONFINITE] > 0],
        [CellState.MISSING, CellState.EMPTY, CellState.ALL_NONFINITE, CellState.SOME_NONFINITE],
        CellState.OBSERVED,
    ).astype(np.uint8)


def _floats(column: pa.ChunkedArray) -> NDArray[np.float64]:
    return np.asarray(column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), dtype=np.float64)


def _update_to_weight(history: History, updates: Grid, every: int) -> NDArray[np.float64]:
    """Return rms of update over rms of parameter, ``[rows, columns]`` of ``updates``; NaN where one has none."""
    weight = np.full(updates.state.shape, np.nan)
    try:
        weights = read_grid(history, "parameter", every=every)
    except KindUnknownError:
        return weight
    row_of = {name: i for i, name in enumerate(weights.names)}
    rows = [(i, row_of[name]) for i, name in enumerate(updates.names) if name in row_of]
    ours, theirs = np.array(rows, np.intp).reshape(-1, 2).T
    _, mine, other = np.intersect1d(updates.step_lo // every, weights.step_lo // every, return_indices=True)
    weight[np.ix_(ours, mine)] = weights.fields["rms"][np.ix_(theirs, other)]
    return ratio_of(updates.fields["rms"], weight)
