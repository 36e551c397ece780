"""Who talks to whom: a tree of fixed fan-in over the ranks, in which each host hangs by a single link.

The ranks of a host form a heap under the lowest of them, its leader. Leaders hang under leaders, in rank order, each at
the free place nearest to rank zero. On one host this is the heap in which the parent of rank r is (r - 1) // k. Half of
a leader's places are kept for other hosts, so the tree stays shallow however many ranks a host has.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from telemetry.errors import ConfigurationError
from telemetry.packet import from_ranges, to_ranges

__all__ = ["TreePosition", "plan_tree", "require_fan_in"]


@dataclass(frozen=True)
class TreePosition:
    """Where one rank stands in the tree.

    Attributes:
        rank: of this process.
        parent: the rank above, None for rank zero.
        depth: links between this rank and rank zero.
        height: links between this rank and the lowest rank below it.
        levels: height of rank zero.
        below: child → ranks of its subtree, the child among them, ascending; children ascending.
    """

    rank: int
    parent: int | None
    depth: int
    height: int
    levels: int
    below: Mapping[int, tuple[int, ...]]

    @property
    def children(self) -> tuple[int, ...]:
        """The ranks directly below, ascending."""
        return tuple(self.below)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """All ranks that this one has a link to; never more than the fan-in and one."""
        return self.children if self.parent is None else (self.parent, *self.children)

    def to_wire(self) -> dict[str, Any]:
        """Return the position as a JSON-serialisable dictionary."""
        below = [[child, to_ranges(ranks)] for child, ranks in self.below.items()]
        return {**vars(self), "below": below}

    @staticmethod
    def from_wire(wire: Mapping[str, Any]) -> TreePosition:
        """Undo :meth:`to_wire`."""
        return TreePosition(**{**wire, "below": {child: from_ranges(ranges) for child, ranges in wire["below"]}})


def require_fan_in(fan_in: int) -> None:
    """Raise :class:`ConfigurationError` unless a tree can have this fan-in."""
    if fan_in < 2:
        raise ConfigurationError(f"fan_in is {fan_in}", remedy="give at least 2; 16 is the default")


def plan_tree(hosts: Sequence[str], fan_in: int) -> tuple[TreePosition, ...]:
    """Return the position of every rank; made by rank zero, which tells every rank its own.

    Args:
        hosts: for each rank the host that it runs on, by any name that is equal where the host is.
        fan_in: most children of a rank.

    Raises:
        ConfigurationError: the fan-in is below 2, or there are no ranks.

    Example:
        >>> [position.parent for position in plan_tree(["a", "a", "b", "b", "b"], 4)]
        [None, 0, 0, 2, 2]
    """
    require_fan_in(fan_in)
    if not hosts:
        raise ConfigurationError("a tree needs at least one rank")
    return _positions(_parents(hosts, fan_in))


def _parents(hosts: Sequence[str], fan_in: int) -> list[int | None]:
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    num_local = fan_in if len(members) == 1 else max(1, fan_in - max(2, fan_in // 2))
    parents: list[int | None] = [None] * len(hosts)
    places: list[tuple[int, int, int]] = []
    for ranks in members.values():
        leader, depth = ranks[0], 0
        if leader != 0:
            above, parent, num_free = heapq.heappop(places)
            parents[leader], depth = parent, above + 1
            _offer_places(places, above, parent, num_free - 1)
        num_top = min(num_local, len(ranks) - 1)
        _hang_heap(parents, ranks, num_top, fan_in)
        _offer_places(places, depth, leader, fan_in - num_top)
    return parents


def _offer_places(places: list[tuple[int, int, int]], depth: int, leader: int, num_free: int) -> None:
    if num_free:
        heapq.heappush(places, (depth, leader, num_free))


def _hang_heap(parents: list[int | None], ranks: Sequence[int], num_top: int, fan_in: int) -> None:
    """Hang the ranks of one host in a heap, in which the first has ``num_top`` children."""
    for index, rank in enumerate(ranks[1:]):
        parents[rank] = ranks[0] if index < num_top else ranks[1 + (index - num_top) // fan_in]


def _positions(parents: Sequence[int | None]) -> tuple[TreePosition, ...]:
    depths = _depths(parents)
    below: list[dict[int, tuple[int, ...]]] = [{} for _ in parents]
    heights = [0] * len(parents)
    for rank in sorted(range(len(parents)), key=lambda rank: (-depths[rank], rank)):
        if (parent := parents[rank]) is not None:
            below[parent][rank] = tuple(sorted((rank, *(low for ranks in below[rank].values() for low in ranks))))
            heights[parent] = max(heights[parent], heights[rank] + 1)
    return tuple(
        TreePosition(rank, parent, depths[rank], heights[rank], heights[0], below[rank])
        for rank, parent in enumerate(parents)
    )


def _depths(parents: Sequence[int | None]) -> list[int]:
    depths: list[int | None] = [0 if parent is None else None for parent in parents]
    for rank in range(len(parents)):
        way, top = [], rank
        while (depth := depths[top]) is None:
            way.append(top)
            parent = parents[top]
            assert parent is not None, "only the root has depth zero"
            top = parent
        for step, passed in enumerate(reversed(way), 1):
            depths[passed] = depth + step
    return [depth for depth in depths if depth is not None]
