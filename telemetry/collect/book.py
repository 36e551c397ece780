"""All sites that this rank has met: their definitions, who counts them, and where their rows are staged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from telemetry.placement import ParallelLayout
from telemetry.sites import SiteSpec

__all__ = ["LocalSite", "SiteBook"]


@dataclass(eq=False)
class LocalSite:
    """A site as one rank knows it.

    Attributes:
        spec: the definition that travels.
        site_id: its key in packets.
        contributes: whether this rank's elements count.
        slots: staging slot on each device that the site was seen on.
    """

    spec: SiteSpec
    site_id: int
    contributes: bool
    slots: dict[torch.device, int] = field(default_factory=dict)


class SiteBook:
    """(kind, name) → site; also keeps which definitions have not been sent yet."""

    def __init__(self, layout: ParallelLayout, rank: int) -> None:
        self._layout = layout
        self._coordinates: Mapping[str, int] = layout.coordinates(rank)
        self._sites: dict[tuple[str, str], LocalSite] = {}
        self._unsent: list[SiteSpec] = []

    def __len__(self) -> int:
        return len(self._sites)

    def find(self, kind: str, name: str) -> LocalSite | None:
        """Return a known site, or None."""
        return self._sites.get((kind, name))

    def of(self, kind: str, name: str) -> LocalSite:
        """Return a site that was defined at attach."""
        return self._sites[kind, name]

    def of_kind(self, kind: str) -> list[LocalSite]:
        """Return the known sites of a kind, in the order in which they were met."""
        return [site for (site_kind, _), site in self._sites.items() if site_kind == kind]

    def add(
        self,
        kind: str,
        name: str,
        *,
        dtype: str,
        shape: tuple[int, ...],
        numel: int | None = None,
        aliases: tuple[str, ...] = (),
        estimated: bool = False,
    ) -> LocalSite:
        """Return the site, defining it if it is new; the definition of the first sight stays."""
        known = self._sites.get((kind, name))
        if known is not None:
            return known
        relation = self._layout.relation(kind)
        spec = SiteSpec(name, kind, dtype, shape, numel, relation.describe(), aliases, estimated)
        site = LocalSite(spec, spec.site_id, relation.contributes(self._coordinates))
        self._sites[kind, name] = site
        self._unsent.append(spec)
        return site

    def take_unsent(self) -> tuple[SiteSpec, ...]:
        """Return the definitions added since the last call."""
        unsent, self._unsent = tuple(self._unsent), []
        return unsent
