"""Quantiles out of exact histogram counts: an estimate between two bounds that hold for certain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from telemetry.errors import ConfigurationError
from telemetry.summary import Histogram, HistogramDescriptor

__all__ = ["QUANTILES", "quantile_rows", "require_quantiles"]

QUANTILES: Final = pa.schema(
    [
        ("step", pa.int64()),
        ("q", pa.float64()),
        ("value", pa.float64()),
        ("lower", pa.float64()),
        ("upper", pa.float64()),
    ]
)


def require_quantiles(quantiles: Sequence[float]) -> None:
    """Raise :class:`ConfigurationError` unless all lie in [0, 1]."""
    for q in quantiles:
        if not 0 <= q <= 1:
            raise ConfigurationError(f"the quantile {q} lies outside of [0, 1]", remedy="a median is q=0.5")


def quantile_rows(
    rows: Iterable[tuple[int, NDArray[np.int64]]], descriptor: HistogramDescriptor, quantiles: Sequence[float]
) -> pa.Table:
    """Return the quantiles of each histogram, with schema ``QUANTILES``.

    Each is :meth:`telemetry.summary.Histogram.quantile`, null where a histogram counts nothing.

    Args:
        rows: step and counts, int64 ``[descriptor.num_counts]``, of each histogram.
        descriptor: their grid.
        quantiles: each in [0, 1].
    """
    found: dict[str, list[float | int]] = {name: [] for name in QUANTILES.names}
    for step, counts in rows:
        histogram = Histogram(descriptor, counts)
        for q in quantiles:
            quantile = histogram.quantile(q)
            row = (step, q, quantile.value, quantile.lower, quantile.upper)
            for name, value in zip(QUANTILES.names, row, strict=True):
                found[name].append(value)
    return pa.table({n: pa.array(v, QUANTILES.field(n).type, from_pandas=True) for n, v in found.items()}, QUANTILES)
