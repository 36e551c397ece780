"""Which block of a logical tensor lies on a rank, so that ranks can agree on single elements without speaking."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from telemetry.dtensor import is_dtensor
from telemetry.placement import FlatShard, RankRelation, Shard

__all__ = ["Block", "block_of"]


@dataclass(frozen=True)
class Block:
    """The part of a logical tensor that a rank holds: a box, or an interval of the row-major order.

    Attributes:
        shape: of the logical tensor.
        offset, local_shape: first index and extent of the box, dim by dim; of an interval, one dim each.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    is_flat: bool = False

    @property
    def numel(self) -> int:
        """Number of elements of the logical tensor."""
        return math.prod(self.shape)

    def local_positions(self, logical: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row-major local positions of those of the ``logical`` row-major positions that lie here."""
        if self.is_flat:
            here = (logical >= self.offset[0]) & (logical < self.offset[0] + self.local_shape[0])
            return logical[here] - self.offset[0]
        index = np.unravel_index(logical, self.shape)
        local = [i - o for i, o in zip(index, self.offset, strict=True)]
        inside = np.ones(len(logical), dtype=bool)
        for position, extent in zip(local, self.local_shape, strict=True):
            inside &= (position >= 0) & (position < extent)
        flat = np.zeros(int(inside.sum()), dtype=np.int64)
        for position, extent in zip(local, self.local_shape, strict=True):
            flat = flat * extent + position[inside]
        return flat


def block_of(tensor: Tensor, relation: RankRelation, sizes: Mapping[str, int], coordinates: Mapping[str, int]) -> Block:
    """Return the block that lies here.

    Args:
        tensor: the local tensor, or a DTensor, which knows its block itself.
        relation: placements of the site. A sharded dim of a plain tensor is taken to be split evenly.
        sizes, coordinates: axis → size, and this rank's index, on the grid of the relation.
    """
    if is_dtensor(tensor):
        return _dtensor_block(tensor)
    shape, offset = list(tensor.shape), [0] * tensor.dim()
    for axis, placement in reversed(relation.placements):
        if isinstance(placement, FlatShard):
            return Block(placement.shape, (placement.start,), (placement.end - placement.start,), is_flat=True)
        if isinstance(placement, Shard) and placement.dim is not None and tensor.dim():
            dim = placement.dim % tensor.dim()
            offset[dim] += coordinates[axis] * shape[dim]
            shape[dim] *= sizes[axis]
    return Block(tuple(shape), tuple(offset), tuple(tensor.shape))


def _dtensor_block(tensor: Tensor) -> Block:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local_shape, offset = compute_local_shape_and_global_offset(
        tensor.shape,
        tensor.device_mesh,  # type: ignore[attr-defined]
        tensor.placements,  # type: ignore[attr-defined]
    )
    return Block(tuple(tensor.shape), tuple(map(int, offset)), tuple(map(int, local_shape)))
