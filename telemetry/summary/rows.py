"""Norms of the rows of a matrix whose elements are spread over ranks in row-major intervals.

An optimizer that shards flat buffers cuts through rows. Sums of squares by row add up over ranks, so the norm of each
row is exact once all ranks have met, and every row counts once, however many ranks share it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from telemetry.errors import PlacementInvalidError
from telemetry.placement import FlatShard

__all__ = ["RowSquares"]


@dataclass(frozen=True, eq=False)
class RowSquares:
    """Σx² of each row, over the elements seen so far.

    Attributes:
        sums: float64 ``[rows]``.
        counts: int64 ``[rows]``, elements seen of each row.
    """

    sums: NDArray[np.float64]
    counts: NDArray[np.int64]

    @staticmethod
    def of(values: NDArray[np.floating], shard: FlatShard) -> RowSquares:
        """Reduce one rank's interval.

        Args:
            values: ``[shard.end - shard.start]``, the elements of the interval; may be empty.
            shard: the interval, of a tensor whose last dim is the row.

        Raises:
            PlacementInvalidError: the values are not as many as the interval holds, or the tensor has no rows.
        """
        if len(shard.shape) < 2 or values.shape != (shard.end - shard.start,):
            raise PlacementInvalidError(
                f"{list(values.shape)} values for the interval {shard.start}:{shard.end} of {list(shard.shape)}",
                remedy="give one value for each position of the interval, of a tensor of two dims or more",
            )
        width = shard.shape[-1]
        rows = np.arange(shard.start, shard.end) // width
        num_rows = int(np.prod(shard.shape[:-1]))
        squares = values.astype(np.float64) ** 2
        sums = np.bincount(rows, weights=squares, minlength=num_rows).astype(np.float64)
        return RowSquares(sums, np.bincount(rows, minlength=num_rows))

    def merge(self, other: RowSquares) -> RowSquares:
        """Return the sums of both sets of elements."""
        return RowSquares(self.sums + other.sums, self.counts + other.counts)

    @property
    def norms(self) -> NDArray[np.float64]:
        """L2 norm of each row, float64 ``[rows]``."""
        return np.sqrt(self.sums)

    @property
    def mean_norm(self) -> float:
        """Mean of the row norms; NaN of no rows."""
        return float(self.norms.mean()) if len(self.sums) else float("nan")
