"""The agreement at attach: what the ranks bring, and whether it is one and the same run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from aggregator.collective.absence import name_ranks
from aggregator.definitions import DefinedSite, join_definitions
from telemetry.errors import (
    CatalogueConflictError,
    ConfigurationError,
    LayoutMismatchError,
    RankfoldError,
    SketchDescriptorMismatchError,
)
from telemetry.protocol import AttachOffer
from telemetry.replicas import MAX_NAMED_RANKS
from telemetry.sites import SiteSpec

__all__ = ["Ballot"]

# What every rank must say alike → (error, remedy) if they do not.
_TERMS: Final[Mapping[str, tuple[type[ConfigurationError], str]]] = {
    "world_size": (LayoutMismatchError, "start every rank in the same process group"),
    "descriptor": (SketchDescriptorMismatchError, "give every rank the same histogram descriptor"),
    "resume_step": (ConfigurationError, "give every rank the same resume_step"),
    "cadence": (
        ConfigurationError,
        "give every rank the same signals and intervals; RANKFOLD_ variables and the settings file count as well",
    ),
}


@dataclass
class Ballot:
    """What a set of ranks brings to attach.

    Attributes:
        failures: rank → its refusal.
        disabled: ranks whose kill switch is set; one is enough to make an agreement without any condition.
        terms: name of a term → value as JSON text → ranks that say so.
        sites: (definition, the lowest ranks that gave it); definitions that conflict stand beside each other.
    """

    failures: dict[int, RankfoldError] = field(default_factory=dict)
    disabled: list[int] = field(default_factory=list)
    terms: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    sites: tuple[DefinedSite, ...] = ()

    @staticmethod
    def of(offer: AttachOffer) -> Ballot:
        """Return the ballot of one rank."""
        values = {
            "world_size": offer.world_size,
            "descriptor": offer.descriptor.to_wire(),
            "resume_step": offer.resume_step,
            "cadence": dict(offer.cadence),
        }
        return Ballot(
            failures={} if offer.failure is None else {offer.rank: offer.failure},
            disabled=list(offer.disabled_by),
            terms={name: {json.dumps(value, sort_keys=True): [offer.rank]} for name, value in values.items()},
            sites=join_definitions([[(site, (offer.rank,)) for site in offer.sites]]),
        )

    def add(self, other: Ballot) -> None:
        """Take in the ballot of other ranks."""
        self.failures.update(other.failures)
        self.disabled = sorted((*self.disabled, *other.disabled))
        for name, values in other.terms.items():
            for value, ranks in values.items():
                self.terms.setdefault(name, {}).setdefault(value, []).extend(ranks)
        self.sites = join_definitions((self.sites, other.sites))

    def refusal(self) -> RankfoldError | None:
        """Return the error that every rank raises, or None if the ranks agree."""
        if self.disabled:
            return None
        return self._failed() or self._terms_differ() or self._sites_conflict()

    def agreed(self, offer: AttachOffer) -> AttachOffer:
        """Return rank zero's offer with what all ranks have brought."""
        return replace(offer, disabled_by=tuple(self.disabled[:MAX_NAMED_RANKS]))

    def _failed(self) -> RankfoldError | None:
        if not self.failures:
            return None
        lowest = self.failures[min(self.failures)]
        return type(lowest)(
            lowest.message,
            remedy=lowest.remedy,
            rank=min(self.failures),
            step=lowest.step,
            site=lowest.site,
            failures={rank: error.message for rank, error in self.failures.items()},
        )

    def _terms_differ(self) -> RankfoldError | None:
        for name, values in self.terms.items():
            if len(values) > 1:
                cls, remedy = _TERMS[name]
                told = "; ".join(f"{name_ranks(ranks)}: {value}" for value, ranks in values.items())
                failures = {rank: f"{name} is {value}" for value, ranks in values.items() for rank in ranks}
                return cls(f"the ranks differ in {name}: {told}", remedy=remedy, failures=failures)
        return None

    def _sites_conflict(self) -> RankfoldError | None:
        first: dict[int, DefinedSite] = {}
        for site, ranks in self.sites:
            known, witnesses = first.setdefault(site.site_id, (site, ranks))
            if difference := known.conflict_with(site):
                return _conflict(site, difference, witnesses, ranks)
        return None

    def to_wire(self) -> dict[str, Any]:
        """Return the ballot as a JSON-serialisable dictionary."""
        return {
            "failures": [[rank, error.to_wire()] for rank, error in self.failures.items()],
            "disabled": self.disabled,
            "terms": self.terms,
            "sites": [[site.to_wire(), ranks] for site, ranks in self.sites],
        }

    @staticmethod
    def from_wire(wire: Mapping[str, Any]) -> Ballot:
        """Undo :meth:`to_wire`."""
        return Ballot(
            failures={rank: RankfoldError.from_wire(error) for rank, error in wire["failures"]},
            disabled=wire["disabled"],
            terms=wire["terms"],
            sites=tuple((SiteSpec.from_wire(site), tuple(ranks)) for site, ranks in wire["sites"]),
        )


def _conflict(
    site: SiteSpec, difference: str, ranks: tuple[int, ...], others: tuple[int, ...]
) -> CatalogueConflictError:
    return CatalogueConflictError(
        f"{name_ranks(ranks)} and {name_ranks(others)} define {site.kind} {site.name} differently: {difference}",
        site=site.name,
        failures={**dict.fromkeys(ranks, "one definition"), **dict.fromkeys(others, "another definition")},
        remedy="give the site the same name, dtype and placement on every rank, or different names",
    )
