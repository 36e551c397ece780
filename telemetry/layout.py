"""The named axes of a job, and where each rank stands on them.

There is one dense grid over all ranks, and beside it, where a model has experts, a second grid of the same ranks with
the axes ``etp ep edp``: an expert's weights are spread differently from everything else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from telemetry.errors import ConfigurationError, LayoutMismatchError
from telemetry.placement import Placement, RankRelation, Replica, Shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Grid", "ParallelLayout"]

WEIGHT_KINDS: Final = frozenset({"parameter", "gradient", "gradient_pre_clip", "gradient_stored", "update"})


@dataclass(frozen=True)
class Grid:
    """Axes, outermost first, and the ranks laid out row-major over them.

    Attributes:
        axes: (name, size) of each axis.
        ranks: the rank at each position; empty where ranks simply count up.
    """

    axes: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if len(set(names)) != len(names):
            raise ConfigurationError(f"the layout names an axis twice: {names}", remedy="name each axis once")
        bad = {name: size for name, size in self.axes if size < 1}
        if bad:
            raise ConfigurationError(f"the layout has axes of size below one: {bad}", remedy="give sizes >= 1")
        if self.ranks and sorted(self.ranks) != list(range(self.size)):
            raise LayoutMismatchError(
                f"the layout orders {len(self.ranks)} ranks that are not 0 to {self.size - 1}",
                remedy="let the order hold each rank of the job once",
            )

    @property
    def size(self) -> int:
        """Product of the axes."""
        return math.prod(size for _, size in self.axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return axis → index of ``rank``."""
        position = self.ranks.index(rank) if self.ranks else rank
        found: dict[str, int] = {}
        for name, size in reversed(self.axes):
            position, found[name] = divmod(position, size)
        return {name: found[name] for name, _ in self.axes}

    def __str__(self) -> str:
        return " × ".join(f"{name} {size}" for name, size in self.axes) or "no axes"


@dataclass(frozen=True)
class ParallelLayout:
    """The layout of a job; the same on every rank.

    Attributes:
        dense: grid of everything but experts.
        expert: grid of expert weights, or None where the job has no experts.
        declared: False where nobody declared a layout and one data-parallel axis was assumed.
        own: (dense, expert) coordinates of this process, where only those are known (process groups).
    """

    dense: Grid
    expert: Grid | None = None
    declared: bool = True
    own: tuple[Mapping[str, int], Mapping[str, int]] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.expert is not None and self.expert.size != self.dense.size:
            raise LayoutMismatchError(
                f"the dense grid has {self.dense.size} ranks ({self.dense}), "
                f"the expert grid {self.expert.size} ({self.expert})",
                remedy="both grids hold every rank of the job: let their products agree",
            )

    @staticmethod
    def from_sizes(
        sizes: Mapping[str, int], *, order: str | None = None, expert: Mapping[str, int] | None = None
    ) -> ParallelLayout:
        """Build a layout from axis sizes.

        Args:
            sizes: axis → size of the dense grid, outermost axis first.
            order: the order of the axes instead, innermost first and joined by dashes (``tp-cp-dp-pp``), as Megatron
                writes it; it may name axes that ``sizes`` lacks.
            expert: axis → size of the expert grid, likewise; for instance ``{"pp": 1, "edp": 2, "ep": 2, "etp": 1}``.

        Raises:
            LayoutMismatchError: the two grids have different products.
            ConfigurationError: a size is below one, or ``order`` lacks an axis.

        Example:
            >>> ParallelLayout.from_sizes({"pp": 2, "dp": 2}).coordinates(1)
            {'pp': 0, 'dp': 1}
            >>> ParallelLayout.from_sizes({"dp": 2, "tp": 2}, order="tp-dp").coordinates(1)
            {'dp': 0, 'tp': 1}
        """
        axes = _ordered(sizes, order)
        return ParallelLayout(Grid(axes), Grid(tuple(expert.items())) if expert else None)

    @staticmethod
    def from_mesh(mesh: DeviceMesh) -> ParallelLayout:
        """Build a layout from a ``DeviceMesh`` over all ranks; dims without a name are called ``dim0``, ``dim1``, …

        A mesh of one unnamed dim is data-parallel and called ``dp``.
        """
        names = mesh.mesh_dim_names or (("dp",) if mesh.ndim == 1 else tuple(f"dim{i}" for i in range(mesh.ndim)))
        ranks = tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
        axes = tuple(zip(names, mesh.mesh.shape, strict=True))
        return ParallelLayout(Grid(axes, () if ranks == tuple(range(len(ranks))) else ranks))

    @staticmethod
    def from_process_groups(groups: Any) -> ParallelLayout:
        """Build a layout from a Megatron process-group collection, or anything with its attributes.

        Reads ``tp cp dp dp_cp pp ep expt_tp expt_dp gtp_remat expt_gtp_remat``; a missing one has size one. A group is
        asked for ``size()`` and ``rank()``.
        """
        dense = _Groups(groups, pp="pp", dp="dp", gtp="gtp_remat", cp="cp", tp="tp")
        if getattr(groups, "dp", None) is None and (both := getattr(groups, "dp_cp", None)) is not None:
            cp = dense.sizes["cp"]
            dense.sizes["dp"], dense.coordinates["dp"] = both.size() // cp, both.rank() // cp
        expert = _Groups(groups, pp="pp", edp="expt_dp", egtp="expt_gtp_remat", ep="ep", etp="expt_tp")
        has_experts = any(expert.sizes[axis] > 1 for axis in ("ep", "etp", "edp", "egtp"))
        return ParallelLayout(
            Grid(tuple(dense.sizes.items())),
            Grid(tuple(expert.sizes.items())) if has_experts else None,
            own=(dense.coordinates, expert.coordinates),
        )

    @staticmethod
    def assumed(world_size: int) -> ParallelLayout:
        """Return the layout of a job that declared none: one data-parallel axis."""
        return ParallelLayout(Grid((("dp", world_size),)), declared=False)

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """(name, size) of the dense axes, outermost first."""
        return self.dense.axes

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dense.size

    def require_world_size(self, world_size: int) -> None:
        """Raise :class:`LayoutMismatchError` unless the axes multiply to ``world_size``."""
        if self.world_size != world_size:
            raise LayoutMismatchError(
                f"the layout has {self.world_size} ranks ({self.dense}), the job has {world_size}",
                remedy="declare sizes that multiply to the world size, or leave layout out for plain data parallelism",
            )

    def coordinates(self, rank: int, *, expert: bool = False) -> Mapping[str, int]:
        """Return axis → index of ``rank`` on the dense or the expert grid."""
        if self.own is not None:
            return self.own[int(expert)]
        grid = self.expert if expert else self.dense
        assert grid is not None, "asked for expert coordinates of a layout without experts"
        return grid.coordinates(rank)

    def relation(self, kind: str, *, expert: bool = False) -> RankRelation:
        """Return where a plain tensor of a source kind lies, when nobody said otherwise.

        Activations are a population over every axis but ``tp``, which replicates them. Weights (parameters, reduced
        gradients, updates) are replicas over every axis but ``pp``, whose stages hold other weights, and for experts
        ``ep``, whose ranks hold other experts.
        """
        grid = self.expert if expert and self.expert is not None else self.dense
        populations = {"pp", "ep"} if expert else {"pp"}

        def default(axis: str) -> Placement:
            if kind in WEIGHT_KINDS:
                return Shard() if axis in populations else Replica()
            return Replica() if axis in ("tp", "etp") else Shard()

        placements = tuple((axis, default(axis)) for axis, _ in grid.axes)
        return RankRelation(placements, expert=grid is self.expert)

    def to_wire(self) -> dict[str, Any]:
        """Return the layout as a JSON-serialisable dictionary, for the run record."""
        return {
            "axes": [list(axis) for axis in self.dense.axes],
            "expert_axes": [list(axis) for axis in self.expert.axes] if self.expert else None,
            "ranks": list(self.dense.ranks) or None,
            "declared": self.declared,
        }

    def __str__(self) -> str:
        text = str(self.dense)
        if self.expert is not None:
            text += f", experts {self.expert}"
        return text if self.declared else f"{text} (assumed: none was declared)"


class _Groups:
    """Sizes and own coordinates, read from the attributes of a process-group collection."""

    def __init__(self, groups: Any, **attribute_of: str) -> None:
        found: Mapping[str, Any] = {axis: getattr(groups, name, None) for axis, name in attribute_of.items()}
        self.sizes = {axis: 1 if group is None else int(group.size()) for axis, group in found.items()}
        self.coordinates = {axis: 0 if group is None else int(group.rank()) for axis, group in found.items()}


def _ordered(sizes: Mapping[str, int], order: str | None) -> tuple[tuple[str, int], ...]:
    if order is None:
        return tuple(sizes.items())
    names: Sequence[str] = order.split("-")
    missing = [axis for axis in sizes if axis not in names]
    if missing:
        raise ConfigurationError(
            f"order {order!r} lacks the axes {', '.join(missing)}", remedy="name every axis of sizes in order"
        )
    return tuple((axis, sizes[axis]) for axis in reversed(names) if axis in sizes)
