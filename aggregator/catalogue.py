"""All sites of a run as the writer knows them, and a merged step with its rows named.

The first definition of a site stays. Once another rank defines the site otherwise, nobody can say what a sum over both
would mean: from that step on its rows are unsupported, and a finding names the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aggregator.checks import MAX_FINDINGS, StepChecks, ranks_in_words
from aggregator.definitions import MAX_WITNESSES, DefinedSite, defined_sites
from telemetry.packet import NO_RANK, Packet
from telemetry.presence import Presence
from telemetry.sites import SiteSpec
from telemetry.summary.merge import identity

__all__ = ["Catalogue", "MergedStep"]

Finding = Mapping[str, Any]

_MAX_NAMED: Final = 16


class Catalogue:
    """Site id → definition, in the order in which sites were first seen; grows, never forgets."""

    def __init__(self) -> None:
        self._sites: dict[int, SiteSpec] = {}
        self._defined_by: dict[int, tuple[int, ...]] = {}
        self._refused: dict[int, str] = {}
        self._named: dict[bytes, tuple[tuple[SiteSpec, ...], StepChecks]] = {}

    def __iter__(self) -> Iterator[SiteSpec]:
        return iter(self._sites.values())

    def __len__(self) -> int:
        return len(self._sites)

    def __contains__(self, site_id: int) -> bool:
        return site_id in self._sites

    def __getitem__(self, site_id: int) -> SiteSpec:
        return self._sites[site_id]

    def add(
        self, definitions: Iterable[SiteSpec], ranks: tuple[int, ...] = ()
    ) -> tuple[tuple[SiteSpec, ...], tuple[Finding, ...]]:
        """Take definitions in that ``ranks`` gave; see :meth:`add_defined`."""
        return self.add_defined((site, ranks) for site in definitions)

    def add_defined(self, definitions: Iterable[DefinedSite]) -> tuple[tuple[SiteSpec, ...], tuple[Finding, ...]]:
        """Take definitions in, each with the ranks that gave it.

        A site drifts when the ranks that defined it define it anew: the new definition takes its place. Where other
        ranks contradict them, the site is refused and the earlier definition kept.

        Returns:
            The sites that are new or have drifted, and a finding for each contradiction.
        """
        new, conflicts = [], []
        for site, ranks in definitions:
            site_id = site.site_id
            known = self._sites.setdefault(site_id, site)
            difference = known.conflict_with(site)
            # Ranks may hold parts of different shapes; a rank that sees its own part change sees another thing.
            if (difference or known.shape != site.shape) and self._has_drifted(site_id, ranks):
                known = self._sites[site_id] = site
                self._defined_by[site_id] = ()
            elif difference:
                conflicts.append(self._refuse(site, difference, ranks))
                continue
            if known is site:
                new.append(site)
            elif not set(site.aliases) <= set(known.aliases):
                self._sites[site_id] = known.with_aliases(site.aliases)
            witnesses = {*self._defined_by.get(site_id, ()), *ranks}
            self._defined_by[site_id] = tuple(sorted(witnesses)[:MAX_WITNESSES])
            self._named.clear()
        return tuple(new), tuple(conflicts)

    def knows(self, sites: NDArray[np.uint64]) -> bool:
        """Tell without a look at each row whether all of ``sites`` are defined: an earlier step had the same."""
        return sites.tobytes() in self._named

    def name_rows(self, sites: NDArray[np.uint64]) -> tuple[tuple[SiteSpec, ...], StepChecks]:
        """Return the definition of each row, and the checks for these rows; cheap if an earlier step had the same."""
        key = sites.tobytes()
        if key not in self._named:
            named = tuple(self._sites[site_id] for site_id in sites.tolist())
            # Cadences of several signals make a few sets of rows; sites that come and go must not make many.
            if len(self._named) >= _MAX_NAMED:
                self._named.clear()
            self._named[key] = named, StepChecks(named)
        return self._named[key]

    def without_refused(self, packet: Packet) -> Packet:
        """Return the packet with no numbers in the rows of sites that ranks define in several ways."""
        if not self._refused:
            return packet
        refused = np.isin(packet.sites, np.array(list(self._refused), np.uint64))
        return _unsupported(packet, refused, self._refused) if refused.any() else packet

    def _has_drifted(self, site_id: int, ranks: tuple[int, ...]) -> bool:
        definers = self._defined_by.get(site_id, ())
        return bool(definers) and site_id not in self._refused and set(definers) <= set(ranks)

    def _refuse(self, site: SiteSpec, difference: str, ranks: tuple[int, ...]) -> Finding:
        others = self._defined_by.get(site.site_id, ())
        who = ranks_in_words(ranks) if ranks else "a rank"
        text = f"{who} against {ranks_in_words(others)}" if others else f"{who} against an earlier one"
        self._refused.setdefault(site.site_id, f"defined in two ways: {text}: {difference}")
        return {
            "code": "catalogue_conflict",
            "message": f"{site.kind} {site.name} is defined in two ways, {text}: {difference}; the first definition "
            "stays, and the site has no numbers from this step on",
            "site": site.name,
            "kind": site.kind,
            "ranks": list(ranks),
            "other_ranks": list(others),
        }


def _unsupported(packet: Packet, rows: NDArray[np.bool_], reasons: Mapping[int, str]) -> Packet:
    texts = tuple(dict.fromkeys((*packet.reasons, *reasons.values())))
    reason = packet.reason.copy()
    reason[rows] = [texts.index(reasons[site_id]) for site_id in packet.sites[rows].tolist()]
    presence = np.where(rows, np.uint8(Presence.UNSUPPORTED), packet.presence)
    return replace(_without_numbers(packet, rows), presence=presence, reason=reason, reasons=texts)


def _without_dropped(packet: Packet) -> Packet:
    """Return the packet with no numbers in rows that some rank has left out: those of the others are not the whole."""
    dropped = (packet.presence == Presence.BUDGET_DROPPED) & (packet.num_observed > 0)
    return _without_numbers(packet, dropped) if dropped.any() else packet


def _without_numbers(packet: Packet, rows: NDArray[np.bool_]) -> Packet:
    no_ints, no_floats = identity(1)
    counted = ~np.isin(packet.hist_sites, packet.sites[rows])
    return replace(
        packet,
        ints=np.where(rows[:, None], no_ints, packet.ints),
        floats=np.where(rows[:, None], no_floats, packet.floats),
        num_observed=np.where(rows, np.int32(0), packet.num_observed),
        num_contributing=np.where(rows, np.int32(0), packet.num_contributing),
        absmax_rank=np.where(rows, np.int32(NO_RANK), packet.absmax_rank),
        num_nonfinite_ranks=np.where(rows, np.int32(0), packet.num_nonfinite_ranks),
        first_nonfinite_rank=np.where(rows, np.int32(NO_RANK), packet.first_nonfinite_rank),
        hist_sites=packet.hist_sites[counted],
        hist_counts=packet.hist_counts[counted],
    )


@dataclass(frozen=True, eq=False)
class MergedStep:
    """One step of the record, as the history and the sinks receive it.

    Attributes:
        packet: merged over all ranks that came; its rows are those of the record.
        sites: definition of each row, aligned with ``packet.sites``.
        new_sites: sites that no earlier step of this segment had.
        missing: rank → reason, for every rank of the world whose observations are not in the rows.
        merge_s: seconds from the first rank's rows at the root of the merge until they were one with all others.
    """

    packet: Packet
    sites: tuple[SiteSpec, ...]
    new_sites: tuple[SiteSpec, ...]
    missing: Mapping[int, str]
    merge_s: float | None = None

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
    def resolve(
        packet: Packet, catalogue: Catalogue, missing: Mapping[int, str] | None = None, merge_s: float | None = None
    ) -> MergedStep:
        """Name the rows of a merged packet, take its new sites into ``catalogue``, and check what it says."""
        new_sites, conflicts = catalogue.add_defined(defined_sites(packet))
        sites, checks = catalogue.name_rows(packet.sites)
        packet = catalogue.without_refused(_without_dropped(packet))
        told = ({**conflict, "step": packet.step} for conflict in conflicts)
        findings = (*packet.findings, *told, *checks.findings(packet))
        return MergedStep(
            packet=replace(packet, findings=findings[:MAX_FINDINGS]),
            sites=sites,
            new_sites=new_sites,
            missing={**packet.abstained, **(missing or {})},
            merge_s=merge_s,
        )
