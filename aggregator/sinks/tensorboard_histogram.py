"""A log2 histogram in TensorBoard's form: the same counts between explicit limits, nothing re-binned.

TensorBoard knows only right edges, so an empty bucket in front carries the left edge of the first one. Non-finite
values have no place between edges; they are counted by scalars.
"""

from __future__ import annotations

import sys
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from telemetry.summary.histogram import HistogramDescriptor

__all__ = ["bucket_limits_and_counts"]

# Zero has a bin of its own, but an interval needs two edges: nothing of float32 lies between this one and zero.
_BELOW_ZERO = -(2.0**-149)


def bucket_limits_and_counts(
    descriptor: HistogramDescriptor, counts: NDArray[np.int64]
) -> tuple[list[float], list[int]] | None:
    """Return right limits, strictly ascending, and the count up to each one, without the empty outer bins.

    Args:
        descriptor: the grid.
        counts: int64 ``[descriptor.num_counts]``.

    Returns:
        Two lists of one length, or None if no finite value was counted.
    """
    finite = counts[1:-2]
    filled = np.flatnonzero(finite)
    if len(filled) == 0:
        return None
    first, last = int(filled[0]), int(filled[-1])
    return _boundaries(descriptor)[first : last + 2].tolist(), [0, *finite[first : last + 1].tolist()]


@lru_cache(maxsize=8)
def _boundaries(descriptor: HistogramDescriptor) -> NDArray[np.float64]:
    """Edges of all finite bins, one more than there are: bin i lies between edges i and i + 1."""
    edges = descriptor.edges()
    top = sys.float_info.max
    return np.concatenate(([-top], -edges[::-1], [_BELOW_ZERO, 0.0], edges, [top]))
