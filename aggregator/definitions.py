"""Definitions of sites with the ranks that gave them: joined on the way up, so that a conflict can name who differs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from telemetry.packet import Packet
from telemetry.sites import SiteSpec

__all__ = ["MAX_WITNESSES", "DefinedSite", "defined_sites", "definition_key", "join_definitions"]

# Ranks kept for each definition of a site: enough to name, small however large the world.
MAX_WITNESSES: Final = 8

# A definition and the lowest ranks that gave it, ascending.
DefinedSite = tuple[SiteSpec, tuple[int, ...]]


def definition_key(site: SiteSpec) -> tuple[Any, ...]:
    """Return all that must be equal for two definitions to be one; shapes and aliases may differ by rank."""
    return site.kind, site.name, site.dtype, site.numel, site.placements, site.estimated


def defined_sites(packet: Packet) -> tuple[DefinedSite, ...]:
    """Return the definitions of a packet with the ranks that gave them."""
    by = packet.defined_by or (packet.ranks[:MAX_WITNESSES],) * len(packet.definitions)
    return tuple(zip(packet.definitions, by, strict=True))


def join_definitions(parts: Iterable[Sequence[DefinedSite]]) -> tuple[DefinedSite, ...]:
    """Make one of what several ranks define alike; definitions that conflict both stay, for the catalogue to refuse."""
    joined: dict[tuple[Any, ...], DefinedSite] = {}
    for part in parts:
        for site, ranks in part:
            key = definition_key(site)
            known, witnesses = joined.get(key, (site, ()))
            if not set(site.aliases) <= set(known.aliases):
                known = known.with_aliases(site.aliases)
            joined[key] = known, tuple(sorted({*witnesses, *ranks})[:MAX_WITNESSES])
    return tuple(joined.values())
