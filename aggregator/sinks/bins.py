"""A log2 histogram as trackers take it: counts between explicit edges, nothing re-binned.

Non-finite values have no place between edges; they are counted by scalars.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from telemetry.summary.histogram import Histogram, HistogramDescriptor

__all__ = ["FiniteBins", "coarsened_bins", "finite_bins", "sparse_counts"]

# Zero has a bin of its own, but an interval needs two edges: nothing of float32 lies between this one and zero.
_BELOW_ZERO: Final = -(2.0**-149)


@dataclass(frozen=True)
class FiniteBins:
    """The bins from the first filled one to the last.

    Attributes:
        edges: strictly ascending and finite, float64 ``[n + 1]``.
        counts: of the values between edges i and i + 1, int64 ``[n]``; the first and the last are not zero.
    """

    edges: NDArray[np.float64]
    counts: NDArray[np.int64]


def finite_bins(histogram: Histogram) -> FiniteBins | None:
    """Return the finite part of a histogram, without the empty outer bins; None if no finite value was counted."""
    finite = histogram.counts[1:-2]
    filled = np.flatnonzero(finite)
    if len(filled) == 0:
        return None
    first, last = int(filled[0]), int(filled[-1])
    return FiniteBins(_edges(histogram.descriptor)[first : last + 2], finite[first : last + 1])


def coarsened_bins(histogram: Histogram, max_bins: int) -> tuple[FiniteBins, int] | None:
    """Return at most ``max_bins`` finite bins, on as fine a grid as that allows, with the same total.

    Every edge of the coarser grid is one of the finer, so no count is split or guessed.

    Args:
        histogram: on any grid.
        max_bins: 511 or more, which holds both signs of the widest grid at one bin an octave.

    Returns:
        The bins, and how many of them there are to an octave; None if no finite value was counted.
    """
    while (bins := finite_bins(histogram)) is not None and len(bins.counts) > max_bins:
        histogram = histogram.coarsen(histogram.descriptor.bins_per_octave // 2)
    return None if bins is None else (bins, histogram.descriptor.bins_per_octave)


def sparse_counts(counts: NDArray[np.int64]) -> Mapping[str, Any]:
    """Return a whole histogram as JSON: the indices of the filled bins in its grid, and their counts."""
    bins = counts.nonzero()[0]
    return {"bins": bins.tolist(), "counts": counts[bins].tolist()}


@lru_cache(maxsize=32)
def _edges(descriptor: HistogramDescriptor) -> NDArray[np.float64]:
    """Edges of all finite bins, one more than there are: bin i lies between edges i and i + 1."""
    edges = descriptor.edges()
    top = sys.float_info.max
    return np.concatenate(([-top], -edges[::-1], [_BELOW_ZERO, 0.0], edges, [top]))
