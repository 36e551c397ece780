"""Which site first held NaN or infinity, and on which rank."""

from __future__ import annotations

from typing import Final

import numpy as np

from aggregator.catalogue import MergedStep
from aggregator.health.check import Check, Evidence, Verdict
from aggregator.health.table import SiteTable
from aggregator.health.thresholds import Thresholds
from telemetry.presence import Presence
from telemetry.summary.fields import FINITE, NAN, NEG_INF, POS_INF, TOTAL

__all__ = ["NONFINITE"]

# What a step computes in which order: what comes first has infected the rest. Call sites stand in the forward pass.
_STAGE: Final = {"activation": 0, "activation_grad": 1, "gradient": 2, "update": 3, "parameter": 4}
# The part of the model that is last is the first to have a gradient.
_BACKWARD: Final = frozenset({"activation_grad", "gradient"})


def _judge(step: MergedStep, table: SiteTable, thresholds: Thresholds) -> Verdict:
    packet = step.packet
    observed = packet.presence == Presence.OBSERVED
    rows = np.flatnonzero(observed & (packet.ints[:, TOTAL] != packet.ints[:, FINITE])).tolist()
    rows.sort(key=lambda row: _place(step, table, row))
    return Verdict(
        frozenset(packet.sites[observed].tolist()),
        {int(packet.sites[row]): _evidence(step, row) for row in rows},
    )


def _place(step: MergedStep, table: SiteTable, row: int) -> tuple[int, int]:
    kind, place = step.sites[row].kind, int(table.order[row])
    return _STAGE.get(kind, 0), -place if kind in _BACKWARD else place


def _evidence(step: MergedStep, row: int) -> Evidence:
    packet = step.packet
    counts = {"nan": NAN, "pos_inf": POS_INF, "neg_inf": NEG_INF, "total": TOTAL}
    return {
        "rank": int(packet.first_nonfinite_rank[row]),
        "num_ranks": int(packet.num_nonfinite_ranks[row]),
        **{name: int(packet.ints[row, column]) for name, column in counts.items()},
        "num_skipped": packet.facts.num_skipped,
    }


def _describe(evidence: Evidence) -> str:
    counts = [f"{evidence[name]} {word}" for name, word in _WORDS.items() if evidence[name]]
    others = f" and {evidence['num_ranks'] - 1} more" if evidence["num_ranks"] > 1 else ""
    skipped = ", the optimizer step was skipped" if evidence["num_skipped"] else ""
    return f"{', '.join(counts)} of {evidence['total']} elements, first on rank {evidence['rank']}{others}{skipped}"


_WORDS: Final = {"nan": "NaN", "pos_inf": "+inf", "neg_inf": "-inf"}

NONFINITE: Final = Check("nonfinite_values", _judge, _describe, limits=(), is_immediate=True)
