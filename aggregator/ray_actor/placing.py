"""Which actor a rank delivers to: the root itself, or a relay near the rank, so that no actor hears too many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from telemetry.errors import ConfigurationError

__all__ = ["ROOT", "Plan", "RelayPlan", "plan_relays", "require_fan_in"]

ROOT: Final = ""

_T = TypeVar("_T")


@dataclass(frozen=True)
class RelayPlan:
    """One relay.

    Attributes:
        name: ``relay-LEVEL-INDEX``.
        node: where it should run.
        target: whom it delivers to, ``ROOT`` or the name of another relay.
        ranks: all ranks whose packets pass through it, ascending.
    """

    name: str
    node: str
    target: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """All relays of an attempt, those next to the root first, and rank → whom it delivers to."""

    relays: tuple[RelayPlan, ...]
    targets: Mapping[int, str]


def require_fan_in(fan_in: int) -> None:
    """Refuse a fan-in that makes no tree.

    Raises:
        ConfigurationError: it is below 2.
    """
    if fan_in < 2:
        raise ConfigurationError(f"fan_in is {fan_in}", remedy="give at least 2 children to an actor")


def plan_relays(nodes: Mapping[int, str], fan_in: int) -> Plan:
    """Plan the tree: ranks of a node meet in a relay there, relays in further relays, until the root hears few.

    Args:
        nodes: rank → node.
        fan_in: most packets of a step that any actor hears, at least 2.

    Returns:
        No relay at all where one node holds all ranks and they are few.

    Example:
        >>> plan_relays({0: "a", 1: "a"}, 16).relays
        ()
        >>> plan_relays({0: "a", 1: "a", 2: "b"}, 16).targets
        {0: 'relay-0-0', 1: 'relay-0-0', 2: 'relay-0-1'}
    """
    if len(set(nodes.values())) <= 1 and len(nodes) <= fan_in:
        return Plan((), dict.fromkeys(nodes, ROOT))
    by_node: dict[str, list[int]] = {}
    for rank in sorted(nodes):
        by_node.setdefault(nodes[rank], []).append(rank)
    groups = [(node, part) for node, ranks in by_node.items() for part in _chunks(ranks, fan_in)]
    groups.sort(key=lambda group: group[1][0])
    level = 0
    levels = [_relays(level, groups)]
    while len(levels[-1]) > fan_in:
        level += 1
        parts = _chunks(levels[-1], fan_in)
        above = _relays(level, [(part[0].node, sorted(r for relay in part for r in relay.ranks)) for part in parts])
        levels[-1] = [_below(relay, above[i // fan_in].name) for i, relay in enumerate(levels[-1])]
        levels.append(above)
    targets = {rank: relay.name for relay in levels[0] for rank in relay.ranks}
    return Plan(tuple(relay for relays in reversed(levels) for relay in relays), dict(sorted(targets.items())))


def _relays(level: int, groups: Sequence[tuple[str, list[int]]]) -> list[RelayPlan]:
    return [RelayPlan(f"relay-{level}-{i}", node, ROOT, tuple(ranks)) for i, (node, ranks) in enumerate(groups)]


def _below(relay: RelayPlan, target: str) -> RelayPlan:
    return RelayPlan(relay.name, relay.node, target, relay.ranks)


def _chunks(items: Sequence[_T], size: int) -> list[list[_T]]:

    return [list(items[start : start + size]) for start in range(0, len(items), size)]
