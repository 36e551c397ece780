"""Where the elements of a tensor are, by mesh axis, and whether a rank counts them.

An *axis* is one of the mesh (``tp``, ``dp``, …), a *dim* one of the tensor. A rank contributes to a site exactly if
its coordinate is 0 on every axis on which the tensor is replicated, and it owns the slot on every axis on which one
coordinate does. All others contribute the identity of merge, so that one merge over the whole world counts each
logical element once, whatever the topology.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from telemetry.errors import PlacementInvalidError

__all__ = ["FlatShard", "Owned", "Partial", "Placement", "RankRelation", "Replica", "Shard"]


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
    """The coordinate ``rank`` of the axis owns the tensor; the others contribute nothing."""

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
    """The placement of one site on every axis of one grid of the layout.

    Attributes:
        placements: (axis, placement), outermost axis first.
        expert: the axes are those of the expert grid.
    """

    placements: tuple[tuple[str, Placement], ...]
    expert: bool = False

    def replace(self, changes: Mapping[str, Placement]) -> RankRelation:
        """Return the relation with other placements on some axes.

        Raises:
            PlacementInvalidError: an axis is not one of the grid's.
        """
        unknown = set(changes) - {axis for axis, _ in self.placements}
        if unknown:
            known = ", ".join(axis for axis, _ in self.placements) or "none"
            raise PlacementInvalidError(
                f"no axis {', '.join(map(repr, sorted(unknown)))} in the layout; its axes are {known}",
                remedy="declare the axis in the layout, or place the tensor on the axes that there are",
            )
        return RankRelation(tuple((axis, changes.get(axis, old)) for axis, old in self.placements), self.expert)

    def contributes(self, coordinates: Mapping[str, int]) -> bool:
        """Tell whether the rank at ``coordinates`` (axis → index) counts its elements."""
        return all(_counts(placement, coordinates[axis]) for axis, placement in self.placements)

    def slot(self, coordinates: Mapping[str, int]) -> tuple[int, ...] | None:
        """Return which part of the site the rank holds: its coordinates on the axes that are no replica.

        Ranks of one slot hold the same elements. None where an axis has an owner, and the rank is not it.
        """
        for axis, placement in self.placements:
            if isinstance(placement, Owned) and coordinates[axis] != placement.rank:
                return None
        return tuple(coordinates[axis] for axis, placement in self.placements if not isinstance(placement, Replica))

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """Axes over which the ranks hold the same elements."""
        return tuple(axis for axis, placement in self.placements if isinstance(placement, Replica))

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
