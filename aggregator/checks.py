"""What a merged step gives away about the job: replicas that differ, elements that are missing, ranks that disagree.

Run where all ranks have met. A finding is a JSON object with ``code``, ``message``, ``step`` and, where they apply,
``site``, ``kind``, ``axes``, ``ranks`` and sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from telemetry.packet import Packet
from telemetry.presence import Presence
from telemetry.replicas import DIGEST_FIELDS, ReplicaTable
from telemetry.sites import SiteSpec
from telemetry.summary.fields import TOTAL

__all__ = ["REPLICA_TOLERANCE", "check_step", "drift"]

Finding = Mapping[str, Any]

REPLICA_TOLERANCE: Final = 1e-6
_EXACT_KINDS: Final = frozenset({"parameter", "gradient"})


def check_step(packet: Packet, sites: Iterable[SiteSpec]) -> tuple[Finding, ...]:
    """Return the findings of a merged step.

    Args:
        packet: merged over all ranks that came.
        sites: definition of each of its rows.
    """
    specs = {site.site_id: site for site in sites}
    return (
        *_replica_findings(packet, specs),
        *_conservation_findings(packet, specs),
        *_optimizer_findings(packet),
    )


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


def _replica_findings(packet: Packet, specs: Mapping[int, SiteSpec]) -> Iterator[Finding]:
    table = packet.replicas
    for (site_id, _), entries in groupby(range(len(table)), key=lambda i: (int(table.sites[i]), int(table.slots[i]))):
        rows = list(entries)
        if len(rows) > 1 and site_id in specs:
            yield from _disagreement(packet.step, table, rows, specs[site_id])


def _disagreement(step: int, table: ReplicaTable, rows: list[int], site: SiteSpec) -> Iterator[Finding]:
    # The majority is taken to be right; on a tie, the entry with the lowest rank, which is the one that counts.
    majority = min(rows, key=lambda i: (-int(table.num_ranks[i]), int(table.ranks[i, 0])))
    axes = [axis for axis, placement in site.placements if placement == "replica"]
    for row in rows:
        if row == majority:
            continue
        absolute, relative = drift(table.digests[row], table.digests[majority])
        within = bool(np.all(np.isfinite(table.digests[[row, majority]]))) and relative <= REPLICA_TOLERANCE
        ranks = [int(rank) for rank in table.ranks[row] if rank >= 0]
        size = "bits differ, the summaries agree" if within else f"the summaries differ by {relative:.3g} relative"
        yield {
            "code": "replica_disagreement",
            "message": f"{site.kind} {site.name}: {_ranks_in_words(ranks, int(table.num_ranks[row]))} "
            f"not equal to the other replicas over {', '.join(axes)}: {size}",
            "step": step,
            "site": site.name,
            "kind": site.kind,
            "axes": axes,
            "ranks": ranks,
            "num_ranks": int(table.num_ranks[row]),
            "beyond_tolerance": not within,
            # JSON has no infinity, and a replica may hold one.
            "absolute": absolute if math.isfinite(absolute) else None,
            "relative": relative if math.isfinite(relative) else None,
            "digest": dict(zip(DIGEST_FIELDS, map(_finite_or_none, table.digests[row]), strict=True)),
        }


def _conservation_findings(packet: Packet, specs: Mapping[int, SiteSpec]) -> Iterator[Finding]:
    complete = (
        (packet.presence == Presence.OBSERVED)
        & (packet.num_observed == packet.num_scheduled)
        & (len(packet.ranks) == packet.world_size)
    )
    for row in np.flatnonzero(complete):
        site = specs.get(int(packet.sites[row]))
        if site is None or site.numel is None or site.estimated or site.kind not in _EXACT_KINDS:
            continue
        total, copies = int(packet.ints[row, TOTAL]), _num_populations(site)
        if total == site.numel or (copies and total % max(site.numel, 1) == 0):
            continue
        placements = ", ".join(f"{axis} {placement}" for axis, placement in site.placements)
        yield {
            "code": "conservation_violated",
            "message": f"{site.kind} {site.name}: {total} elements were counted of a tensor of {site.numel}; "
            f"its placement ({placements}) does not describe where its elements are",
            "step": packet.step,
            "site": site.name,
            "kind": site.kind,
            "total": total,
            "numel": site.numel,
        }


def _num_populations(site: SiteSpec) -> bool:
    """Tell whether ranks of some axis hold further tensors under the same name, as pipeline stages may."""
    return any(placement == "shard" for _, placement in site.placements)


def _optimizer_findings(packet: Packet) -> Iterator[Finding]:
    facts = packet.facts
    if facts.num_applied and facts.num_skipped:
        yield {
            "code": "optimizer_disagreement",
            "message": f"the optimizer stepped on {facts.num_applied} ranks and was skipped on {facts.num_skipped}, "
            f"{_ranks_in_words(list(facts.skipped_ranks), facts.num_skipped)} among them",
            "step": packet.step,
            "ranks": list(facts.skipped_ranks),
        }


def _ranks_in_words(named: list[int], count: int) -> str:
    more = f" and {count - len(named)} more" if count > len(named) else ""
    is_one = len(named) == 1 and not more
    return f"{'rank' if is_one else 'ranks'} {', '.join(map(str, named))}{more} {'is' if is_one else 'are'}"


def _finite_or_none(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
