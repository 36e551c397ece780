"""Stored columns back to the numbers that people ask for: every summary field, estimates scaled to the whole.

Law: what is stored is what was counted. A site that is marked ``estimated`` was sampled, so its sums and its norm,
which grow with the number of elements, are scaled to the whole here: ``sum sum_sq sum_abs`` by numel / total, ``l2`` by
sqrt(numel / finite). Counts, extremes and central sums stay those of the sample.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from telemetry.summary import derive, identity
from telemetry.summary.fields import FINITE, FLOAT_FIELDS, INT_FIELDS, TOTAL

__all__ = ["packed_rows", "scale_estimates", "summary_values"]

_SUMS: Final = frozenset({"sum", "sum_sq", "sum_abs"})


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
        numel: float64 ``[rows]``, elements that an estimated row stands for, NaN where that is not known; a row that
            is not estimated has -1.

    Returns:
        int64 for a count, float64 otherwise.
    """
    values = derive(field, ints, floats)
    if field in INT_FIELDS:
        return pa.array(values, mask=~observed)
    scaled = scale_estimates(field, np.asarray(values, dtype=np.float64), ints, numel)
    return pa.array(scaled, mask=~observed | np.isnan(scaled))


def scale_estimates(
    field: str, values: NDArray[np.float64], ints: NDArray[np.int64], numel: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Scale the sums and the norm of sampled rows to ``numel`` elements; see :func:`summary_values`."""
    if field not in _SUMS and field != "l2":
        return values
    with np.errstate(divide="ignore", invalid="ignore"):
        factor: NDArray[Any] = np.sqrt(numel / ints[:, FINITE]) if field == "l2" else numel / ints[:, TOTAL]
        return np.where(numel == -1, values, values * factor)
