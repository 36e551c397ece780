"""What a DTensor knows of itself: which axes of the job split it, and its elements that lie here.

The mesh of a DTensor may be a slice of the job's mesh, may be flattened from several axes, and may have no names. So
its dims are matched to the layout by ranks: a mesh dim stands for those axes of the layout on which the ranks of the
dim differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from telemetry.errors import PlacementInvalidError
from telemetry.layout import ParallelLayout
from telemetry.placement import Partial, Placement, Replica, Shard

__all__ = ["is_dtensor", "is_partial", "layout_of", "local_tensor", "placements_of", "reduced"]


def is_dtensor(tensor: Tensor) -> bool:
    """Tell whether a tensor is distributed; cheap, because every observed tensor is asked."""
    # A plain tensor cannot be one, and importing DTensor costs a second that not every job has to pay.
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return False
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def is_partial(tensor: Tensor) -> bool:
    """Tell whether a tensor is a DTensor that is not yet reduced over some axis."""
    return is_dtensor(tensor) and any(p.is_partial() for p in tensor.placements)  # type: ignore[attr-defined]


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor that lie on this rank; waits for a collective that still brings them."""
    local: Any = tensor
    if is_dtensor(tensor):
        with torch.no_grad():
            local = local.detach().to_local()
    # An AsyncCollectiveTensor is a promise; its memory holds nothing yet.
    arrived: Tensor = local.wait() if type(local).__name__ == "AsyncCollectiveTensor" else local
    return arrived


def reduced(tensor: Any) -> Tensor:
    """Return a scratch copy of a DTensor with every partial placement reduced; all ranks of its mesh call this."""
    from torch.distributed.tensor import Replicate

    target = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    with torch.no_grad():
        copy: Tensor = tensor.detach().redistribute(placements=target)
    return copy


def placements_of(tensor: Any, layout: ParallelLayout) -> dict[str, Placement]:
    """Return axis → placement for the axes of the layout that the DTensor's mesh covers.

    Raises:
        PlacementInvalidError: a mesh dim matches no set of axes, or the placement is of an unknown kind.
    """
    found: dict[str, Placement] = {}
    for dim, placement in enumerate(tensor.placements):
        ranks = _ranks_along(tensor.device_mesh, dim)
        for axis in _axes_that_differ(ranks, layout):
            found[axis] = _converted(placement)
    return found


def layout_of(tensors: Sequence[Tensor], world_size: int) -> ParallelLayout | None:
    """Return the layout that DTensors imply, where their mesh is, or is cut from, a mesh of the whole job."""
    for tensor in tensors:
        if is_dtensor(tensor):
            mesh = _root_mesh(tensor.device_mesh)  # type: ignore[attr-defined]
            if mesh.size() == world_size:
                return ParallelLayout.from_mesh(mesh)
    return None


def _root_mesh(mesh: Any) -> Any:
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # torch < 2.9

    return _mesh_resources.get_root_mesh(mesh)


def _ranks_along(mesh: Any, dim: int) -> list[int]:
    here = list(mesh.get_coordinate())
    here[dim] = slice(None)
    return [int(rank) for rank in mesh.mesh[tuple(here)].tolist()]


def _axes_that_differ(ranks: Sequence[int], layout: ParallelLayout) -> tuple[str, ...]:
    if len(ranks) == 1:
        return ()
    coordinates = [layout.dense.coordinates(rank) for rank in ranks]
    axes = tuple(axis for axis, _ in layout.axes if len({c[axis] for c in coordinates}) > 1)
    spanned = 1
    for axis, size in layout.axes:
        spanned *= size if axis in axes else 1
    if spanned != len(ranks):
        raise PlacementInvalidError(
            f"a DTensor is placed over ranks {list(ranks)}, which no set of axes of the layout ({layout}) spans",
            remedy="declare the layout from the job's mesh: watch(…, layout=mesh)",
        )
    return axes


def _converted(placement: Any) -> Placement:
    if placement.is_replicate():
        return Replica()
    if placement.is_partial():
        return Partial(str(getattr(placement, "reduce_op", "sum")))
    # Shard, and _StridedShard, which newer torch does not derive from it.
    if hasattr(placement, "dim"):
        return Shard(int(placement.dim))
    raise PlacementInvalidError(
        f"a DTensor has the placement {placement}, which is neither replicated, sharded nor partial",
        remedy="declare the placement of the site: watch(…, placements={name: {axis: placement}})",
    )
