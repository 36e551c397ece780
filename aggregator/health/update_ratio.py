"""By how much of its own size a step changes a weight: rms of the realised update over rms of the weight.

Both rows have to be of one step. The weight is the one after the update. Where the update is followed on a sample, its
rms is an estimate; a ratio of root mean squares needs no scaling for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

import numpy as np

from aggregator.catalogue import MergedStep
from aggregator.health.check import Check, Evidence, Verdict
from aggregator.health.thresholds import Thresholds
from telemetry.presence import Presence
from telemetry.summary import derive

__all__ = ["UPDATE_TOO_LARGE", "UPDATE_TOO_SMALL", "update_ratios"]


def update_ratios(step: MergedStep) -> dict[int, float | None]:
    """Return row of an update → its update-to-weight ratio, for each update with its weight in the same step.

    None where there is no such number: nothing finite, or a weight that is all zero.
    """
    rms = np.asarray(derive("rms", step.packet.ints, step.packet.floats), dtype=np.float64).tolist()
    observed = (step.packet.presence == Presence.OBSERVED).tolist()
    weights = {site.name: row for row, site in enumerate(step.sites) if site.kind == "parameter" and observed[row]}
    return {
        row: _ratio(rms[row], rms[weights[site.name]])
        for row, site in enumerate(step.sites)
        if site.kind == "update" and observed[row] and site.name in weights
    }


def _ratio(update: float, weight: float) -> float | None:
    if not weight > 0.0 or update != update:
        return None
    ratio = update / weight
    return ratio if np.isfinite(ratio) else None


def _judge(step: MergedStep, thresholds: Thresholds, order: Mapping[int, int], *, is_upper: bool) -> Verdict:
    # Where the optimizer did not step, no update is right.
    if not step.packet.facts.num_applied:
        return Verdict(frozenset(), {})
    # Vectors are left out: a bias begins at zero, so that at first each step changes it by its own size.
    ratios = {
        row: ratio
        for row, ratio in update_ratios(step).items()
        if ratio is not None and len(step.sites[row].shape) >= 2
    }
    limit = thresholds.update_ratio_high if is_upper else thresholds.update_ratio_low
    rows = [row for row, ratio in ratios.items() if (ratio > limit if is_upper else ratio < limit)]
    rows.sort(key=lambda row: (-ratios[row] if is_upper else ratios[row], order[int(step.packet.sites[row])]))
    return Verdict(
        frozenset(int(step.packet.sites[row]) for row in ratios),
        {int(step.packet.sites[row]): _evidence(step, row, ratios[row]) for row in rows},
    )


def _evidence(step: MergedStep, row: int, ratio: float) -> Evidence:
    return {"ratio": ratio, "estimated": step.sites[row].estimated}


def _describe(evidence: Evidence) -> str:
    about = "about " if evidence["estimated"] else ""
    return f"the step changes the weight by {about}{evidence['ratio']:.3g} of its size"


UPDATE_TOO_LARGE: Final = Check(
    "update_too_large",
    partial(_judge, is_upper=True),
    _describe,
    limits=("update_ratio_high",),
    is_immediate=False,
)
UPDATE_TOO_SMALL: Final = Check(
    "update_too_small",
    partial(_judge, is_upper=False),
    _describe,
    limits=("update_ratio_low",),
    is_immediate=False,
)
