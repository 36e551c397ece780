"""Statistics that follow from a packed row and are therefore never stored.

Everything here is vectorised over rows and returns NaN where there is no value (no finite element, or no spread to
divide by); who shows the result turns that into "no value". ``skewness`` and ``kurtosis`` are the population
coefficients; ``kurtosis`` is the excess one, 0 for a normal distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from telemetry.summary import fields as f

__all__ = ["DERIVED_FIELDS", "ELEMENTWISE_FIELDS", "SUMMARY_FIELDS", "derive"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def _mean_square(ints: Ints, floats: Floats) -> Floats:
    return np.asarray(floats[..., f.SUM_SQ] / ints[..., f.FINITE])


def _variance(ints: Ints, floats: Floats) -> Floats:
    return np.asarray(floats[..., f.M2] / ints[..., f.FINITE])


def _skewness(ints: Ints, floats: Floats) -> Floats:
    return np.asarray(floats[..., f.M3] / ints[..., f.FINITE] / _variance(ints, floats) ** 1.5)


def _kurtosis(ints: Ints, floats: Floats) -> Floats:
    return np.asarray(floats[..., f.M4] / ints[..., f.FINITE] / _variance(ints, floats) ** 2 - 3.0)


def _l2(ints: Ints, floats: Floats) -> Floats:
    return np.where(ints[..., f.FINITE] > 0, np.sqrt(floats[..., f.SUM_SQ]), np.nan)


_FORMULAS: Final[Mapping[str, Callable[[Ints, Floats], Floats]]] = MappingProxyType(
    {
        "std": lambda i, x: np.sqrt(_variance(i, x)),
        "var": _variance,
        "rms": lambda i, x: np.sqrt(_mean_square(i, x)),
        "l2": _l2,
        "mean_abs": lambda i, x: np.asarray(x[..., f.SUM_ABS] / i[..., f.FINITE]),
        "skewness": _skewness,
        "kurtosis": _kurtosis,
        "zero_fraction": lambda i, x: np.asarray(i[..., f.ZERO] / i[..., f.TOTAL]),
        "finite_fraction": lambda i, x: np.asarray(i[..., f.FINITE] / i[..., f.TOTAL]),
    }
)

DERIVED_FIELDS: Final = tuple(_FORMULAS)
SUMMARY_FIELDS: Final = (*f.INT_FIELDS, *f.FLOAT_FIELDS, *DERIVED_FIELDS)

# Of these a sample estimates the whole without scaling; of sums, norms and counts it does not.
ELEMENTWISE_FIELDS: Final = frozenset(
    {"mean", "std", "var", "rms", "mean_abs", "skewness", "kurtosis", "zero_fraction", "finite_fraction"}
)


def derive(field: str, ints: Ints, floats: Floats) -> Ints | Floats:
    """Return one field of every row.

    Args:
        field: any of ``SUMMARY_FIELDS``.
        ints: int64 ``[..., 8]``; floats: float64 ``[..., 10]``.

    Returns:
        int64 ``[...]`` for a count, float64 ``[...]`` otherwise, NaN where a row has no such value.
    """
    if field in f.INT_FIELDS:
        return ints[..., f.INT_FIELDS.index(field)]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if field in _FORMULAS:
            return _FORMULAS[field](ints, floats)
        values = floats[..., f.FLOAT_FIELDS.index(field)]
        has_value = field in ("sum", "sum_sq", "sum_abs", "m2", "m3", "m4")
        return values if has_value else np.where(ints[..., f.FINITE] > 0, values, np.nan)
