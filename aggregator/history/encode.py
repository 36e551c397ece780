"""A merged step becomes Arrow tables: numbers where there are some, null where there are none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from aggregator.catalogue import MergedStep
from aggregator.history.schema import FINDINGS, OBSERVATIONS, REPLICA_LABELS, SITES, STEPS
from aggregator.strict_json import to_strict_json
from telemetry.packet import NO_RANK, Packet
from telemetry.presence import Presence
from telemetry.sites import SiteSpec
from telemetry.summary.fields import FINITE, FLOAT_FIELDS, INT_FIELDS

__all__ = ["encode_findings", "encode_observations", "encode_sites", "encode_step", "statistic_columns"]

# Of no finite elements these are the identity of merge, which is no number.
_NEED_FINITE = frozenset({"min", "max", "absmax", "mean"})

_STEP_ROW = pa.struct(list(STEPS))
_HIST_BINS, _HIST_COUNTS = (OBSERVATIONS.field(name).type for name in ("hist_bins", "hist_counts"))

_NO_SITES = SITES.empty_table()
_NO_FINDINGS = FINDINGS.empty_table()


def encode_observations(packet: Packet) -> pa.Table:
    """Return the rows of a step that were scheduled, with schema ``OBSERVATIONS``."""
    rows = np.flatnonzero(packet.presence != Presence.NOT_SCHEDULED)
    unobserved = packet.presence[rows] != Presence.OBSERVED
    bins, counts = _sparse_histograms(packet, rows, unobserved)
    columns: dict[str, Any] = {
        "step": np.full(len(rows), packet.step, dtype=np.int64),
        "site": packet.sites[rows],
        "presence": packet.presence[rows],
        "reason": _reasons(packet, rows),
        "num_scheduled": packet.num_scheduled[rows],
        "num_observed": packet.num_observed[rows],
        "num_contributing": packet.num_contributing[rows],
        "absmax_rank": _ranks(packet.absmax_rank[rows], unobserved),
        "num_nonfinite_ranks": pa.array(packet.num_nonfinite_ranks[rows], mask=unobserved),
        "first_nonfinite_rank": _ranks(packet.first_nonfinite_rank[rows], unobserved),
        "replicas": pa.array(_replica_verdicts(packet)[rows], mask=unobserved),
        "hist_bins": bins,
        "hist_counts": counts,
        **statistic_columns(packet.ints[rows], packet.floats[rows], ~unobserved),
    }
    return pa.table(columns, schema=OBSERVATIONS)


def statistic_columns(
    ints: NDArray[np.int64], floats: NDArray[np.float64], observed: NDArray[np.bool_]
) -> dict[str, pa.Array]:
    """Return the columns of statistics, null where a row has none.

    Args:
        ints, floats: ``[rows, 8]`` and ``[rows, 10]`` as merged.
        observed: bool ``[rows]``, which rows have numbers at all.
    """
    unobserved = ~observed
    no_finite = unobserved | (ints[:, FINITE] == 0)
    return {
        **{name: pa.array(ints[:, i], mask=unobserved) for i, name in enumerate(INT_FIELDS)},
        **{
            name: pa.array(floats[:, i], mask=no_finite if name in _NEED_FINITE else unobserved)
            for i, name in enumerate(FLOAT_FIELDS)
        },
    }


def _reasons(packet: Packet, rows: NDArray[np.intp]) -> pa.Array:
    # No reason is -1 there.
    reason = packet.reason[rows]
    return pa.array(packet.reasons, pa.string()).take(pa.array(reason, mask=reason < 0))


def _ranks(ranks: NDArray[np.int32], unobserved: NDArray[np.bool_]) -> pa.Array:
    return pa.array(ranks, mask=unobserved | (ranks == NO_RANK))


def _replica_verdicts(packet: Packet) -> NDArray[np.uint8]:
    """Return for each row of the packet the place of its verdict in ``REPLICA_LABELS``."""
    agree, disagree, not_checked = range(len(REPLICA_LABELS))
    verdicts = np.full(packet.num_rows, not_checked, np.uint8)
    table = packet.replicas
    if len(table) == 0 or packet.num_rows == 0:
        return verdicts
    # Entries are ascending by (site, slot, fingerprint), each once: two of one part are two different contents of it.
    differs = (table.sites[1:] == table.sites[:-1]) & (table.slots[1:] == table.slots[:-1])
    verdicts[np.isin(packet.sites, table.sites[table.num_ranks > 1])] = agree
    verdicts[np.isin(packet.sites, table.sites[1:][differs])] = disagree
    return verdicts


def _sparse_histograms(
    packet: Packet, rows: NDArray[np.intp], unobserved: NDArray[np.bool_]
) -> tuple[pa.Array, pa.Array]:
    """Return the bins that are not empty and their counts, null for a row without a histogram."""
    if not len(packet.hist_sites):
        return pa.nulls(len(rows), _HIST_BINS), pa.nulls(len(rows), _HIST_COUNTS)
    absent = unobserved | ~np.isin(packet.sites[rows], packet.hist_sites)
    dense = packet.hist_counts[np.searchsorted(packet.hist_sites, packet.sites[rows[~absent]])]
    owner, bins = np.nonzero(dense)
    lengths = np.zeros(len(rows), dtype=np.int64)
    lengths[~absent] = np.bincount(owner, minlength=len(dense))
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
    mask = pa.array(absent)
    return (
        pa.ListArray.from_arrays(offsets, pa.array(bins.astype(np.uint16)), mask=mask),
        pa.ListArray.from_arrays(offsets, pa.array(dense[owner, bins]), mask=mask),
    )


def encode_step(step: MergedStep) -> pa.Table:
    """Return the one row that tells what happened around the observations, with schema ``STEPS``."""
    packet, missing = step.packet, dict(sorted(step.missing.items()))
    row = {
        "step": packet.step,
        **vars(packet.facts),
        "merge_s": step.merge_s,
        "world_size": packet.world_size,
        "num_ranks": step.num_ranks,
        "missing_ranks": list(missing),
        "missing_reasons": list(missing.values()),
        "abstained_ranks": sorted(packet.abstained),
    }
    return pa.Table.from_struct_array(pa.array([row], _STEP_ROW))


def encode_sites(sites: Iterable[SiteSpec], first_step: int) -> pa.Table:
    """Return the definitions, with schema ``SITES``."""
    rows = [
        {
            **site.to_wire(),
            "site": site.site_id,
            "placements": [{"axis": axis, "placement": placement} for axis, placement in site.placements],
            "first_step": first_step,
        }
        for site in sites
    ]
    return pa.Table.from_pylist(rows, schema=SITES) if rows else _NO_SITES


def encode_findings(findings: Iterable[Mapping[str, Any]], step: int) -> pa.Table:
    """Return the findings, with schema ``FINDINGS``; ``details`` holds each one whole, as JSON."""
    rows = [
        {
            "step": step,
            "code": str(finding["code"]),
            "message": str(finding["message"]),
            "rank": rank if isinstance(rank := finding.get("rank"), int) else None,
            "site": site if isinstance(site := finding.get("site"), str) else None,
            "details": to_strict_json(finding),
        }
        for finding in findings
    ]
    return pa.Table.from_pylist(rows, schema=FINDINGS) if rows else _NO_FINDINGS
