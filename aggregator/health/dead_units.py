"""Activations that are nearly all zero."""

from __future__ import annotations

from typing import Final

import numpy as np

from aggregator.catalogue import MergedStep
from aggregator.health.check import Check, Evidence, Verdict
from aggregator.health.table import SiteTable
from aggregator.health.thresholds import Thresholds
from telemetry.presence import Presence
from telemetry.summary.fields import TOTAL, ZERO

__all__ = ["DEAD_UNITS"]


def _judge(step: MergedStep, table: SiteTable, thresholds: Thresholds) -> Verdict:
    packet = step.packet
    zero, total = packet.ints[:, ZERO], packet.ints[:, TOTAL]
    judged = table.is_activation & (packet.presence == Presence.OBSERVED) & (total > 0)
    fraction = zero / np.maximum(total, 1)
    rows = np.flatnonzero(judged & (fraction > thresholds.dead_zero_fraction)).tolist()
    rows.sort(key=lambda row: (-fraction[row], table.order[row]))
    return Verdict(
        frozenset(packet.sites[judged].tolist()),
        {
            int(packet.sites[row]): {
                "zero": int(zero[row]),
                "total": int(total[row]),
                "zero_fraction": float(fraction[row]),
            }
            for row in rows
        },
    )


def _describe(evidence: Evidence) -> str:
    return f"{evidence['zero_fraction']:.1%} of {evidence['total']} elements are exactly zero"


DEAD_UNITS: Final = Check("units_dead", _judge, _describe, limits=("dead_zero_fraction",), is_immediate=False)
