"""All sites of a run as the writer knows them, and a merged step with its rows named."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from aggregator.checks import check_step
from telemetry.packet import Packet
from telemetry.sites import SiteSpec

__all__ = ["Catalogue", "MergedStep"]


class Catalogue:
    """Site id → definition, in the order in which sites were first seen; grows, never forgets."""

    def __init__(self) -> None:
        self._sites: dict[int, SiteSpec] = {}

    def __iter__(self) -> Iterator[SiteSpec]:
        return iter(self._sites.values())

    def __len__(self) -> int:
        return len(self._sites)

    def __contains__(self, site_id: int) -> bool:
        return site_id in self._sites

    def __getitem__(self, site_id: int) -> SiteSpec:
        return self._sites[site_id]

    def add(self, definitions: Iterable[SiteSpec]) -> tuple[tuple[SiteSpec, ...], tuple[str, ...]]:
        """Take definitions in.

        Returns:
            The sites that are new, and a text for each definition that contradicts an earlier one (the earlier
            one is kept).
        """
        new, conflicts = [], []
        for site in definitions:
            known = self._sites.setdefault(site.site_id, site)
            if known is site:
                new.append(site)
            elif difference := known.conflict_with(site):
                conflicts.append(f"{site.kind} {site.name}: {difference}")
            else:
                self._sites[site.site_id] = known.with_aliases(site.aliases)
        return tuple(new), tuple(conflicts)


@dataclass(frozen=True, eq=False)
class MergedStep:
    """One step of the record, as the history and the sinks receive it.

    Attributes:
        packet: merged over all ranks that came; its rows are those of the record.
        sites: definition of each row, aligned with ``packet.sites``.
        new_sites: sites that no earlier step of this segment had.
        missing: rank → reason, for every rank of the world whose observations are not in the rows.
    """

    packet: Packet
    sites: tuple[SiteSpec, ...]
    new_sites: tuple[SiteSpec, ...]
    missing: Mapping[int, str]

    @property
    def step(self) -> int:
        """The caller's optimizer-step number."""
        return self.packet.step

    @property
    def is_partial(self) -> bool:
        """Whether some rank's observations are missing."""
        return bool(self.missing)

    @property
    def num_ranks(self) -> int:
        """Number of ranks whose observations are in the rows."""
        return len(set(self.packet.ranks) - self.missing.keys())

    @staticmethod
    def resolve(packet: Packet, catalogue: Catalogue, missing: Mapping[int, str] | None = None) -> MergedStep:
        """Name the rows of a merged packet and take its new sites into ``catalogue``."""
        new_sites, conflicts = catalogue.add(packet.definitions)
        findings: tuple[Mapping[str, Any], ...] = tuple(
            {"code": "catalogue_conflict", "message": text, "step": packet.step} for text in conflicts
        )
        sites = tuple(catalogue[int(site_id)] for site_id in packet.sites)
        return MergedStep(
            packet=replace(packet, findings=(*packet.findings, *findings, *check_step(packet, sites))),
            sites=sites,
            new_sites=new_sites,
            missing={**packet.abstained, **(missing or {})},
        )
