"""Gradients that grow or shrink too fast from one layer to the next."""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from aggregator.catalogue import MergedStep
from aggregator.health.check import Check, Evidence, Verdict
from aggregator.health.table import SiteTable
from aggregator.health.thresholds import Thresholds
from telemetry.presence import Presence
from telemetry.summary import derive

__all__ = ["EXPLODING", "VANISHING"]


def _judge(step: MergedStep, table: SiteTable, thresholds: Thresholds, *, is_growth: bool) -> Verdict:
    """Judge each pair of neighbours under the id of the site that lies farther from the loss."""
    packet, rms = step.packet, np.asarray(derive("rms", step.packet.ints, step.packet.floats), dtype=np.float64)
    lower, upper = table.neighbours((packet.presence == Presence.OBSERVED) & np.isfinite(rms))
    # No gradient at all nearer to the loss: then what there is came by another way.
    lower, upper = lower[rms[upper] > 0.0], upper[rms[upper] > 0.0]
    with np.errstate(divide="ignore", over="ignore"):
        severity = rms[lower] / rms[upper] if is_growth else rms[upper] / rms[lower]
    bad = severity > thresholds.gradient_ratio
    worst_first = np.lexsort((table.order[lower[bad]], -severity[bad]))
    pairs = zip(lower[bad][worst_first].tolist(), upper[bad][worst_first].tolist(), strict=True)
    return Verdict(
        frozenset(packet.sites[lower].tolist()),
        {int(packet.sites[one]): _evidence(step, rms, one, other) for one, other in pairs},
    )


def _evidence(step: MergedStep, rms: NDArray[np.float64], lower: int, upper: int) -> Evidence:
    with np.errstate(over="ignore"):
        ratio = float(rms[lower] / rms[upper])
    return {
        "rms": float(rms[lower]),
        "neighbour": step.sites[upper].name,
        "neighbour_rms": float(rms[upper]),
        # Of two very different numbers the ratio may overflow, and JSON has no infinity.
        "ratio": ratio if np.isfinite(ratio) else None,
    }


def _describe(evidence: Evidence) -> str:
    ratio = "more than 1e308" if evidence["ratio"] is None else f"{evidence['ratio']:.3g}"
    return (
        f"rms {evidence['rms']:.3g} is {ratio} times that of {evidence['neighbour']} ({evidence['neighbour_rms']:.3g})"
    )


EXPLODING: Final = Check(
    "gradient_exploding", partial(_judge, is_growth=True), _describe, limits=("gradient_ratio",), is_immediate=True
)
VANISHING: Final = Check(
    "gradient_vanishing", partial(_judge, is_growth=False), _describe, limits=("gradient_ratio",), is_immediate=True
)
