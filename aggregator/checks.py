"""What a merged step gives away about the job: replicas that differ, elements that are missing, ranks that disagree.

Run where all ranks have met. A finding is a JSON object with ``code``, ``message``, ``step`` and, where they apply,
``site``, ``kind``, ``axes``, ``ranks`` and sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from telemetry.packet import Packet
from telemetry.presence import Presence
from telemetry.replicas import DIGEST_FIELDS, ReplicaTable
from telemetry.sites import SiteSpec
from telemetry.summary.fields import TOTAL

__all__ = ["MAX_FINDINGS", "REPLICA_TOLERANCE", "StepChecks", "check_step", "drift", "ranks_in_words"]

Finding = Mapping[str, Any]

# Of one step: a model whose every weight differs says no more with its ten thousandth.
MAX_FINDINGS: Final = 256
REPLICA_TOLERANCE: Final = 1e-6
_EXACT_KINDS: Final = frozenset({"parameter", "gradient"})


def check_step(packet: Packet, sites: Iterable[SiteSpec]) -> tuple[Finding, ...]:
    """Return the findings of a merged step, ``MAX_FINDINGS`` at most.

    Args:
        packet: merged over all ranks that came.
        sites: definition of each of its rows, in any order, and perhaps of others.
    """
    return StepChecks(sites).findings(packet)


class StepChecks:
    """The checks for one set of sites; what depends on the definitions alone is computed once for all steps."""

    def __init__(self, sites: Iterable[SiteSpec]) -> None:
        """Prepare for packets whose rows are among ``sites``."""
        self._specs = {site.site_id: site for site in sites}
        self._ids = np.array(sorted(self._specs), dtype=np.uint64)
        ordered = [self._specs[site_id] for site_id in self._ids.tolist()]
        self._numel = np.array([_checked_numel(site) for site in ordered], dtype=np.int64)
        self._repeats = np.array([_has_populations(site) for site in ordered], dtype=bool)

    def findings(self, packet: Packet) -> tuple[Finding, ...]:
        """Return the findings of a merged step, ``MAX_FINDINGS`` at most."""
        found = (self._replica_findings, self._conservation_findings, _optimizer_findings)
        return tuple(islice((finding for check in found for finding in check(packet)), MAX_FINDINGS))

    def _replica_findings(self, packet: Packet) -> Iterator[Finding]:
        table = packet.replicas
        is_same = (table.sites[1:] == table.sites[:-1]) & (table.slots[1:] == table.slots[:-1])
        edges = np.diff(np.concatenate(([False], is_same, [False])).astype(np.int8))
        for first, last in zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True):
            site = self._specs.get(int(table.sites[first]))
            if site is not None:
                yield from _disagreement(packet.step, table, range(first, last + 1), site)

    def _conservation_findings(self, packet: Packet) -> Iterator[Finding]:
        complete = (
            (packet.presence == Presence.OBSERVED)
            & (packet.num_observed == packet.num_scheduled)
            & (len(packet.ranks) == packet.world_size)
        )
        total, numel, repeats = packet.ints[:, TOTAL], *self._expected(packet.sites)
        is_multiple = repeats & (total % np.maximum(numel, 1) == 0)
        for row in np.flatnonzero(complete & (numel >= 0) & (total != numel) & ~is_multiple):
            yield _conservation_violated(packet.step, self._specs[int(packet.sites[row])], int(total[row]))

    def _expected(self, sites: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return for each row its number of elements, -1 where none is expected, and whether multiples of it are."""
        if np.array_equal(sites, self._ids):
            return self._numel, self._repeats
        known = np.isin(sites, self._ids)
        where = np.searchsorted(self._ids, sites[known])
        numel, repeats = np.full(len(sites), -1, dtype=np.int64), np.zeros(len(sites), dtype=bool)
        numel[known], repeats[known] = self._numel[where], self._repeats[where]
        return numel, repeats


def drift(values: NDArray[np.float64], reference: NDArray[np.float64]) -> tuple[float, float]:
    """Return the largest absolute difference, and the largest difference relative to the larger magnitude.

    Example:
        >>> import numpy as np
        >>> drift(np.array([100.0]), np.array([101.0]))  # (1, 1/101)
        (1.0, 0.009900990099009901)
    """
    difference = np.abs(values - reference)
    larger = np.maximum(np.abs(values), np.abs(reference))
    relative = np.divide(difference, larger, out=np.zeros_like(difference), where=larger > 0)
    return float(difference.max(initial=0.0)), float(relative.max(initial=0.0))


def _disagreement(step: int, table: ReplicaTable, rows: Sequence[int], site: SiteSpec) -> Iterator[Finding]:
    # The majority is taken to be right; on a tie, the entry with the lowest rank, which is the one that counts.
    majority = min(rows, key=lambda i: (-int(table.num_ranks[i]), int(table.ranks[i, 0])))
    axes = [axis for axis, placement in site.placements if placement == "replica"]
    for row in rows:
        if row == majority:
            continue
        absolute, relative = drift(table.digests[row], table.digests[majority])
        within = bool(np.all(np.isfinite(table.digests[[row, majority]]))) and relative <= REPLICA_TOLERANCE
        ranks, count = [int(rank) for rank in table.ranks[row] if rank >= 0], int(table.num_ranks[row])
        size = "bits differ, the summaries agree" if within else f"the summaries differ by {relative:.3g} relative"
        yield {
            "code": "replica_disagreement",
            "message": f"{site.kind} {site.name}: {ranks_in_words(ranks, count)} {_are(count)} "
            f"not equal to the other replicas over {', '.join(axes)}: {size}",
            "step": step,
            "site": site.name,
            "kind": site.kind,
            "axes": axes,
            "ranks": ranks,
            "num_ranks": count,
            "beyond_tolerance": not within,
            # JSON has no infinity, and a replica may hold one.
            "absolute": absolute if math.isfinite(absolute) else None,
            "relative": relative if math.isfinite(relative) else None,
            "digest": dict(zip(DIGEST_FIELDS, map(_finite_or_none, table.digests[row]), strict=True)),
        }


def _conservation_violated(step: int, site: SiteSpec, total: int) -> Finding:
    placements = ", ".join(f"{axis} {placement}" for axis, placement in site.placements)
    return {
        "code": "conservation_violated",
        "message": f"{site.kind} {site.name}: {total} elements were counted of a tensor of {site.numel}; "
        f"its placement ({placements}) does not describe where its elements are",
        "step": step,
        "site": site.name,
        "kind": site.kind,
        "total": total,
        "numel": site.numel,
    }


def _checked_numel(site: SiteSpec) -> int:
    """Return how many elements a complete observation has, -1 where nobody can say."""
    is_exact = site.kind in _EXACT_KINDS and site.numel is not None and not site.estimated
    return site.numel if is_exact and site.numel is not None else -1


def _has_populations(site: SiteSpec) -> bool:
    """Tell whether ranks of some axis hold further tensors under the same name, as pipeline stages may."""
    return any(placement == "shard" for _, placement in site.placements)


def _optimizer_findings(packet: Packet) -> Iterator[Finding]:
    facts = packet.facts
    if facts.num_applied and facts.num_skipped:
        yield {
            "code": "optimizer_disagreement",
            "message": f"the optimizer stepped on {facts.num_applied} ranks and was skipped on {facts.num_skipped}, "
            f"{ranks_in_words(facts.skipped_ranks, facts.num_skipped)} {_are(facts.num_skipped)} among them",
            "step": packet.step,
            "ranks": list(facts.skipped_ranks),
        }


def ranks_in_words(named: Sequence[int], count: int | None = None) -> str:
    """Return ranks for a sentence; ``count`` is how many there are, if not all are named."""
    hidden = (count or 0) - len(named)
    more = f" and {hidden} more" if hidden > 0 else ""
    return f"{'rank' if len(named) == 1 and not more else 'ranks'} {', '.join(map(str, named))}{more}"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _finite_or_none(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
