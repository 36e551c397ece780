"""Where the elements of a tensor are: placements by mesh axis, and which rank counts them.

An *axis* is one of the mesh (``tp``, ``dp``, …), a *dim* one of the tensor. A rank contributes to a site exactly if
its coordinate is 0 on every axis on which the tensor is replicated, and it owns the slot on every axis on which one
rank does. All others contribute the identity of merge, so that one merge over the whole world counts each logical
element once, whatever the topology.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from telemetry.errors import ConfigurationError, LayoutMismatchError, PlacementInvalidError

__all__ = [
    "FlatShard",
    "Owned",
    "ParallelLayout",
    "Partial",
    "Placement",
    "RankRelation",
    "Replica",
    "Shard",
]


@dataclass(frozen=True)
class Replica:
    """Every rank of the axis holds the same elements; the one with coordinate 0 counts."""

    def __str__(self) -> str:
        return "replica"


@dataclass(frozen=True)
class Shard:
    """Every rank of the axis holds other elements; all count.

    Attributes:
        dim: tensor dimension that is split, or None where no dimension is known to represent the axis.
    """

    dim: int | None = None

    def __str__(self) -> str:
        return "shard" if self.dim is None else f"shard({self.dim})"


@dataclass(frozen=True)
class FlatShard:
    """The rank holds the row-major elements [start, end) of a tensor of ``shape``; the interval may be empty."""

    shape: tuple[int, ...]
    start: int
    end: int

    def __post_init__(self) -> None:
        numel = math.prod(self.shape)
        if not 0 <= self.start <= self.end <= numel:
            raise PlacementInvalidError(
                f"flat interval {self.start}:{self.end} does not lie in the {numel} elements of {list(self.shape)}",
                remedy="give 0 <= start <= end <= number of elements",
            )

    def __str__(self) -> str:
        # Only what is the same on all ranks: the interval is each rank's own.
        return f"flat_shard({','.join(map(str, self.shape))})"


@dataclass(frozen=True)
class Owned:
    """One coordinate of the axis owns the tensor; the others contribute nothing."""

    rank: int

    def __str__(self) -> str:
        return f"owned({self.rank})"


@dataclass(frozen=True)
class Partial:
    """The true value is the reduction over the axis; a local value is no sample of it and is refused."""

    op: str = "sum"

    def __str__(self) -> str:
        return f"partial({self.op})"


Placement = Replica | Shard | FlatShard | Owned | Partial


@dataclass(frozen=True)
class RankRelation:
    """The placement of one site on every axis of the layout."""

    placements: tuple[tuple[str, Placement], ...]

    def contributes(self, coordinates: Mapping[str, int]) -> bool:
        """Tell whether the rank at ``coordinates`` (axis → index) counts its elements."""
        return all(_counts(placement, coordinates[axis]) for axis, placement in self.placements)

    @property
    def partial_axes(self) -> tuple[str, ...]:
        """Axes over which the local value is not yet reduced."""
        return tuple(axis for axis, placement in self.placements if isinstance(placement, Partial))

    def describe(self) -> tuple[tuple[str, str], ...]:
        """Return (axis, placement in words), equal on every rank that shares the site."""
        return tuple((axis, str(placement)) for axis, placement in self.placements)


def _counts(placement: Placement, coordinate: int) -> bool:
    if isinstance(placement, Replica):
        return coordinate == 0
    if isinstance(placement, Owned):
        return coordinate == placement.rank
    return True


@dataclass(frozen=True)
class ParallelLayout:
    """The named axes of the job, outermost first; ranks are numbered row-major over them.

    Attributes:
        axes: (name, size) of each axis.
        declared: False where nobody declared a layout and one data-parallel axis was assumed.
    """

    axes: tuple[tuple[str, int], ...]
    declared: bool = True

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if len(set(names)) != len(names):
            raise ConfigurationError(f"layout names an axis twice: {names}", remedy="name each axis once")
        bad = {name: size for name, size in self.axes if size < 1}
        if bad:
            raise ConfigurationError(f"layout has axes of size below one: {bad}", remedy="give sizes >= 1")

    @staticmethod
    def from_sizes(sizes: Mapping[str, int]) -> ParallelLayout:
        """Build a layout from axis sizes, outermost axis first.

        Example:
            >>> ParallelLayout.from_sizes({"pp": 2, "dp": 2}).coordinates(1)
            {'pp': 0, 'dp': 1}
        """
        return ParallelLayout(tuple(sizes.items()))

    @staticmethod
    def assumed(world_size: int) -> ParallelLayout:
        """Return the layout of a job that declared none: one data-parallel axis."""
        return ParallelLayout((("dp", world_size),), declared=False)

    @property
    def world_size(self) -> int:
        """Product of the axes."""
        return math.prod(size for _, size in self.axes)

    def require_world_size(self, world_size: int) -> None:
        """Raise :class:`LayoutMismatchError` unless the axes multiply to ``world_size``."""
        if self.world_size != world_size:
            product = " × ".join(f"{name} {size}" for name, size in self.axes) or "no axes"
            raise LayoutMismatchError(
                f"the layout has {self.world_size} ranks ({product}), the job has {world_size}",
                remedy="declare sizes that multiply to the world size, or leave layout out for plain data parallelism",
            )

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return axis → index of ``rank``."""
        found: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name, _ in self.axes}

    def relation(self, kind: str) -> RankRelation:
        """Return where a plain tensor of a source kind lies, when nobody said otherwise.

        Activations are a population over every axis but ``tp``; parameters, reduced gradients and updates are
        replicas over every axis but ``pp``, whose stages hold different sites.
        """
        weights = kind in ("parameter", "gradient", "update")
        return RankRelation(
            tuple(
                (name, Replica() if (name != "pp" if weights else name == "tp") else Shard()) for name, _ in self.axes
            )
        )
