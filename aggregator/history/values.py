"""Stored columns back to the numbers that people ask for: every summary field, null where a row has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from aggregator.estimates import scale_estimates
from telemetry.presence import Presence
from telemetry.summary import derive
from telemetry.summary.fields import FLOAT_FIELDS, INT_FIELDS, NUM_FLOATS, NUM_INTS

__all__ = ["float_values", "needed_columns", "packed_rows", "steps_behind"]

_ALWAYS: Final = ("finite", "total")
_DERIVED_FROM: Final[Mapping[str, tuple[str, ...]]] = {
    "std": ("m2",),
    "var": ("m2",),
    "rms": ("sum_sq",),
    "l2": ("sum_sq",),
    "mean_abs": ("sum_abs",),
    "skewness": ("m2", "m3"),
    "kurtosis": ("m2", "m4"),
    "zero_fraction": ("zero",),
    "finite_fraction": (),
}


def needed_columns(field: str) -> tuple[str, ...]:
    """Return the stored columns from which a float field follows, its scaling to the whole included."""
    return (*_ALWAYS, *_DERIVED_FROM.get(field, (field,)))


def packed_rows(table: pa.Table) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return ints ``[rows, 8]`` and floats ``[rows, 10]`` as committed; null, or a column not read, is 0 and NaN."""
    ints = np.zeros((table.num_rows, NUM_INTS), dtype=np.int64)
    floats = np.full((table.num_rows, NUM_FLOATS), np.nan)
    there = set(table.column_names)
    for i, name in enumerate(INT_FIELDS):
        if name in there:
            _fill(ints[:, i], table[name])
    for i, name in enumerate(FLOAT_FIELDS):
        if name in there:
            _fill(floats[:, i], table[name])
    return ints, floats


def steps_behind(stored: pa.Table) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the first step of every row, the number of its steps, and of those at which it was observed.

    A row stands for one step, but those of a run in memory that has become coarse, see ``schema.SPANS``.

    Args:
        stored: columns ``step`` and ``presence``, and those of ``SPANS`` where there are some.
    """
    step = stored["step"].to_numpy()
    if "num_steps" in stored.column_names:
        return stored["step_lo"].to_numpy(), stored["num_steps"].to_numpy(), stored["num_observed_steps"].to_numpy()
    observed = stored["presence"].to_numpy() == Presence.OBSERVED
    return step, np.ones(len(step), np.int64), observed.astype(np.int64)


def _fill(column: NDArray[Any], stored: pa.ChunkedArray) -> None:
    column[stored.is_valid().to_numpy()] = stored.drop_null().to_numpy()


def float_values(
    field: str,
    ints: NDArray[np.int64],
    floats: NDArray[np.float64],
    observed: NDArray[np.bool_],
    numel: NDArray[np.float64],
) -> pa.Array:
    """Return one field of every row as float64, null where it has no value.

    Args:
        field: any of ``telemetry.summary.SUMMARY_FIELDS`` that is not a count; counts are read as they are stored.
        ints, floats: packed rows.
        observed: bool ``[rows]``, which rows have numbers at all.
        numel: float64 ``[rows]``, see :func:`aggregator.estimates.scale_estimates`.
    """
    values = np.asarray(derive(field, ints, floats), dtype=np.float64)
    scaled = scale_estimates(field, values, ints, numel)
    return pa.array(scaled, mask=~observed | np.isnan(scaled))
