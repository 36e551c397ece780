"""Weights that a step changes by too much or too little of their size."""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np

from aggregator.catalogue import MergedStep
from aggregator.health.check import Check, Evidence, Verdict
from aggregator.health.table import SiteTable
from aggregator.health.thresholds import Thresholds
from aggregator.health.update_ratio import update_ratios

__all__ = ["UPDATE_TOO_LARGE", "UPDATE_TOO_SMALL"]


def _judge(step: MergedStep, table: SiteTable, thresholds: Thresholds, *, is_upper: bool) -> Verdict:
    # Where the optimizer did not step, no update is right.
    if not step.packet.facts.num_applied:
        return Verdict(frozenset(), {})
    rows, ratios = update_ratios(step, table.updates, table.weights)
    rows, ratios = rows[~np.isnan(ratios)], ratios[~np.isnan(ratios)]
    bad = ratios > thresholds.update_ratio_high if is_upper else ratios < thresholds.update_ratio_low
    worst_first = np.lexsort((table.order[rows[bad]], -ratios[bad] if is_upper else ratios[bad]))
    ids = step.packet.sites
    return Verdict(
        frozenset(ids[rows].tolist()),
        {
            int(ids[row]): {"ratio": float(ratio), "estimated": step.sites[row].estimated}
            for row, ratio in zip(rows[bad][worst_first], ratios[bad][worst_first], strict=True)
        },
    )


def _describe(evidence: Evidence) -> str:
    about = "about " if evidence["estimated"] else ""
    return f"the step changes the weight by {about}{evidence['ratio']:.3g} of its size"


UPDATE_TOO_LARGE: Final = Check(
    "update_too_large", partial(_judge, is_upper=True), _describe, limits=("update_ratio_high",), is_immediate=False
)
UPDATE_TOO_SMALL: Final = Check(
    "update_too_small", partial(_judge, is_upper=False), _describe, limits=("update_ratio_low",), is_immediate=False
)
