"""Stored columns back to the numbers that people ask for: every summary field, null where a row has none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from aggregator.estimates import scale_estimates
from telemetry.summary import derive, identity
from telemetry.summary.fields import FLOAT_FIELDS, INT_FIELDS

__all__ = ["packed_rows", "summary_values"]


def packed_rows(table: pa.Table) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return ints ``[rows, 8]`` and floats ``[rows, 10]`` as committed; null becomes the identity of merge."""
    ints, floats = identity(table.num_rows)
    for i, name in enumerate(INT_FIELDS):
        _fill(ints[:, i], table[name])
    for i, name in enumerate(FLOAT_FIELDS):
        _fill(floats[:, i], table[name])
    return ints, floats


def _fill(column: NDArray[Any], stored: pa.ChunkedArray) -> None:
    column[stored.is_valid().to_numpy()] = stored.drop_null().to_numpy()


def summary_values(
    field: str,
    ints: NDArray[np.int64],
    floats: NDArray[np.float64],
    observed: NDArray[np.bool_],
    numel: NDArray[np.float64],
) -> pa.Array:
    """Return one field of every row, null where it has no value.

    Args:
        field: any of ``telemetry.summary.SUMMARY_FIELDS``.
        ints, floats: packed rows.
        observed: bool ``[rows]``, which rows have numbers at all.
        numel: float64 ``[rows]``, see :func:`aggregator.estimates.scale_estimates`.

    Returns:
        int64 for a count, float64 otherwise.
    """
    values = derive(field, ints, floats)
    if field in INT_FIELDS:
        return pa.array(values, mask=~observed)
    scaled = scale_estimates(field, np.asarray(values, dtype=np.float64), ints, numel)
    return pa.array(scaled, mask=~observed | np.isnan(scaled))
