"""Who talks to whom: a heap-shaped tree of fixed fan-in over the ranks.

The parent of rank r is (r - 1) // k and its children are r·k + 1 … r·k + k, so a rank needs no table to know its
neighbours, and rank zero is the root.
"""

from __future__ import annotations

from dataclasses import dataclass

from telemetry.errors import ConfigurationError

__all__ = ["TreePosition"]


@dataclass(frozen=True)
class TreePosition:
    """Where one rank stands in the tree.

    Attributes:
        rank, world_size: of the job.
        fan_in: most children of one rank.
    """

    rank: int
    world_size: int
    fan_in: int

    def __post_init__(self) -> None:
        if self.fan_in < 2:
            raise ConfigurationError(f"fan_in is {self.fan_in}", remedy="give at least 2; 16 is the default")
        if not 0 <= self.rank < self.world_size:
            raise ConfigurationError(f"rank {self.rank} lies outside of a world of {self.world_size}")

    @property
    def parent(self) -> int | None:
        """The rank above, None for the root."""
        return None if self.rank == 0 else (self.rank - 1) // self.fan_in

    @property
    def children(self) -> tuple[int, ...]:
        """The ranks directly below, ascending."""
        first = self.rank * self.fan_in + 1
        return tuple(range(min(first, self.world_size), min(first + self.fan_in, self.world_size)))

    @property
    def depth(self) -> int:
        """Links between this rank and the root."""
        depth, rank = 0, self.rank
        while rank:
            depth, rank = depth + 1, (rank - 1) // self.fan_in
        return depth

    @property
    def height(self) -> int:
        """Links between this rank and the lowest rank below it; the first child is on the longest way down."""
        height, lowest = 0, self.rank
        while (lowest := lowest * self.fan_in + 1) < self.world_size:
            height += 1
        return height

    def subtree(self, top: int | None = None) -> tuple[int, ...]:
        """Return ``top`` (this rank if None) and every rank below it, ascending."""
        level: tuple[int, ...] = (self.rank if top is None else top,)
        found: list[int] = []
        while level:
            found.extend(level)
            level = tuple(child for rank in level for child in self._at(rank).children)
        return tuple(found)

    def _at(self, rank: int) -> TreePosition:
        return TreePosition(rank, self.world_size, self.fan_in)
