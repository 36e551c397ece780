"""Many steps of a series folded into one row: the merge of ranks, over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from aggregator.history.present import represented
from aggregator.history.series import SeriesCatalogue
from aggregator.history.values import float_values, packed_rows, steps_behind
from telemetry.presence import Presence
from telemetry.summary import DERIVED_FIELDS, FLOAT_FIELDS, INT_FIELDS, identity, merge_packed

__all__ = ["COARSE_FIELDS", "as_merged", "coarsened", "merge_runs"]

COARSE_FIELDS: Final = (*INT_FIELDS, *FLOAT_FIELDS, *DERIVED_FIELDS)
_OBSERVED: Final = int(Presence.OBSERVED)


@dataclass(frozen=True)
class _Runs:
    """Rows in the order of (series, span, step), and where each run of one series and span begins and ends."""

    order: NDArray[np.intp]
    starts: NDArray[np.intp]
    ends: NDArray[np.intp]

    def sums(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sum over each run of one value a row."""
        if not len(values):
            return np.zeros(0, np.int64)
        sums: NDArray[np.int64] = np.add.reduceat(values[self.order], self.starts)
        return sums


def coarsened(stored: pa.Table, catalogue: SeriesCatalogue, every: int, fields: Sequence[str]) -> pa.Table:
    """Return one row for each series and each ``every`` steps in which it has rows, ordered by series and step.

    Args:
        stored: all columns of ``OBSERVATIONS`` that hold statistics, ordered by step within a site.
        catalogue: has every site of the rows.
        every: steps n·every to (n + 1)·every - 1 become one.
        fields: names of ``COARSE_FIELDS``.
    """
    step = stored["step"].to_numpy()
    places = catalogue.places(stored["site"].to_numpy(), stored["segment"].to_numpy(), step)
    runs = _runs(places, step // every, step)
    step_lo, num_steps, observed = steps_behind(stored)
    ints, floats = as_merged(stored, stored["presence"].to_numpy() == _OBSERVED)
    ints, floats = merge_runs(ints[runs.order], floats[runs.order], runs.starts, runs.ends)
    num_observed = runs.sums(observed)
    first = places[runs.order][runs.starts]
    numel = represented(catalogue, first, num_observed)
    columns: dict[str, Any] = {name: catalogue.table[name].take(pa.array(first)) for name in ("site", "kind", "series")}
    columns["step_lo"] = step_lo[runs.order][runs.starts]
    columns["step_hi"] = step[runs.order][runs.ends - 1]
    columns["num_steps"] = runs.sums(num_steps)
    columns["num_observed_steps"] = num_observed
    for name in fields:
        if name in INT_FIELDS:
            columns[name] = pa.array(ints[:, INT_FIELDS.index(name)], mask=num_observed == 0)
        else:
            columns[name] = float_values(name, ints, floats, num_observed > 0, numel)
    return pa.table(columns)


def _runs(places: NDArray[np.intp], spans: NDArray[np.int64], step: NDArray[np.int64]) -> _Runs:
    order = np.lexsort((step, spans, places))
    keys = np.stack((places[order], spans[order]))
    starts = np.flatnonzero(np.concatenate(([True], np.any(keys[:, 1:] != keys[:, :-1], axis=0)))[: len(order)])
    return _Runs(order, starts, np.append(starts[1:], len(order))[: len(starts)])


def as_merged(stored: pa.Table, observed: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return packed rows as they were merged: the identity of merge where a row has no numbers.

    Args:
        stored: the columns of ``OBSERVATIONS`` that hold statistics.
        observed: bool ``[rows]``, which rows have numbers.

    Returns:
        int64 ``[rows, 8]`` and float64 ``[rows, 10]``.
    """
    ints, floats = packed_rows(stored)
    no_ints, no_floats = identity(len(ints))
    finite = ints[:, INT_FIELDS.index("finite")] > 0
    absent = np.isnan(floats) & ~finite[:, None]
    return np.where(observed[:, None], ints, no_ints), np.where(absent | ~observed[:, None], no_floats, floats)


def merge_runs(
    ints: NDArray[np.int64], floats: NDArray[np.float64], starts: NDArray[np.intp], ends: NDArray[np.intp]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Merge the rows of each run from first to last, all runs side by side.

    Args:
        ints, floats: ``[rows, 8]`` int64 and ``[rows, 10]`` float64.
        starts, ends: of each run, ends exclusive; no run is empty.
    """
    merged_ints, merged_floats = ints[starts].copy(), floats[starts].copy()
    for offset in range(1, int((ends - starts).max(initial=1))):
        longer = np.flatnonzero(ends - starts > offset)
        rows = starts[longer] + offset
        merged = merge_packed((merged_ints[longer], merged_floats[longer]), (ints[rows], floats[rows]))
        merged_ints[longer], merged_floats[longer] = merged
    return merged_ints, merged_floats
