"""Which placement a site gets: what the user declared, else what the tensor says, else the rule of its kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from telemetry.dtensor import is_dtensor, placements_of
from telemetry.errors import ConfigurationError, PlacementInvalidError
from telemetry.layout import WEIGHT_KINDS, ParallelLayout
from telemetry.placement import Partial, Placement, RankRelation, Replica, Shard

__all__ = ["CallDims", "DeclaredPlacements", "PlacementRules"]

DeclaredPlacements = Mapping[str | tuple[str, str], Mapping[str, Placement]]
"""Glob of site names, or (source kind, glob) → axis → placement."""


@dataclass(frozen=True)
class CallDims:
    """What a call site tells of its tensor: which dim each axis splits; see ``telemetry.observe_tensor``.

    A rank's data on the sequence and batch axes is a population whether or not a dim is known to represent it.
    """

    tp_shard_dim: int | None = None
    sequence_dim: int | None = None
    batch_dim: int | None = None

    def placements(self, tensor: Tensor) -> dict[str, Placement]:
        """Return axis → placement, for the axes that a call site speaks of.

        Raises:
            PlacementInvalidError: a dim is not one of the tensor's.
        """
        tp, batch = self._dim("tp_shard_dim", tensor), self._dim("batch_dim", tensor)
        return {
            "tp": Replica() if tp is None else Shard(tp),
            "cp": Shard(self._dim("sequence_dim", tensor)),
            "dp": Shard(batch),
            "gtp": Shard(batch),
        }

    def _dim(self, name: str, tensor: Tensor) -> int | None:
        dim: int | None = getattr(self, name)
        if dim is None or 0 <= dim < tensor.dim():
            return dim
        # From the front, so that two ranks that say the same thing differently agree.
        if -tensor.dim() <= dim < 0:
            return dim + tensor.dim()
        raise PlacementInvalidError(
            f"{name} is {dim}, the tensor has {tensor.dim()} dims", remedy="give a dim of the tensor, or None"
        )


class PlacementRules:
    """Decides the relation of each site of one rank; asked once for each site, when it is first seen.

    Args:
        layout: of the job.
        declared: the user's placements; the last rule that matches a site wins on each axis that it names.
        experts: globs of the names of expert weights, besides those that Megatron marks (``allreduce`` is False).
        reduce_partial: partial DTensors are reduced before they are read, and are replicas then.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        declared: DeclaredPlacements | None = None,
        experts: Sequence[str] = (),
        *,
        reduce_partial: bool = False,
    ) -> None:
        self._layout = layout
        self._reduce_partial = reduce_partial
        self._declared = tuple((declared or {}).items())
        self._experts = (experts,) if isinstance(experts, str) else tuple(experts)
        for key, placements in self._declared:
            _require_placements(key, placements)

    def relation(self, kind: str, name: str, tensor: Tensor | None, dims: CallDims | None = None) -> RankRelation:
        """Return the relation of a site; ``dims`` is what its call site said, where it is one.

        Raises:
            PlacementInvalidError: a declaration or a DTensor names an axis that the layout lacks, or a call site a
                dim that its tensor lacks.
        """
        relation = self._layout.relation(kind, expert=kind in WEIGHT_KINDS and self._is_expert(name, tensor))
        if tensor is not None and dims is not None:
            axes = {axis for axis, _ in relation.placements}
            relation = relation.replace({a: p for a, p in dims.placements(tensor).items() if a in axes})
        if tensor is not None:
            relation = relation.replace(self._own_placements(kind, tensor, relation))
        for key, placements in self._declared:
            if _matches(key, kind, name):
                relation = relation.replace(placements)
        return relation

    def _is_expert(self, name: str, tensor: Tensor | None) -> bool:
        return not getattr(tensor, "allreduce", True) or any(fnmatchcase(name, glob) for glob in self._experts)

    def _own_placements(self, kind: str, tensor: Any, relation: RankRelation) -> dict[str, Placement]:
        if is_dtensor(tensor):
            found = placements_of(tensor, self._layout)
            if self._reduce_partial:
                return {axis: Replica() if isinstance(p, Partial) else p for axis, p in found.items()}
            return found
        axes = {axis for axis, _ in relation.placements}
        own: dict[str, Placement] = {}
        if kind in WEIGHT_KINDS and getattr(tensor, "tensor_model_parallel", False):
            dim = getattr(tensor, "partition_dim", -1)
            own |= {axis: Shard(dim if dim >= 0 else None) for axis in axes & {"tp", "etp"}}
        if kind in WEIGHT_KINDS and getattr(tensor, "is_gtp_weight_remat", False):
            own |= {axis: Shard(0) for axis in axes & {"gtp", "egtp"}}
        return own


def _matches(key: str | tuple[str, str], kind: str, name: str) -> bool:
    if isinstance(key, tuple):
        return key[0] == kind and fnmatchcase(name, key[1])
    return fnmatchcase(name, key)


def _require_placements(key: object, placements: Mapping[str, Placement]) -> None:
    is_key = isinstance(key, str) or (isinstance(key, tuple) and len(key) == 2)
    if not is_key or not isinstance(placements, Mapping):
        raise ConfigurationError(
            f"placements has the entry {key!r}: {placements!r}",
            remedy='give a glob or (kind, glob), and axis → placement: {"*.router": {"tp": Replica()}}',
        )
    for axis, placement in placements.items():
        if not isinstance(placement, Placement):
            raise ConfigurationError(
                f"placements[{key!r}] puts {placement!r} on the axis {axis!r}",
                remedy="use Replica(), Shard(dim), FlatShard(shape, start, end), Owned(rank) or Partial(op)",
            )
