"""Gradients that grow or shrink too fast from one layer to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from aggregator.catalogue import MergedStep
from aggregator.health.check import Check, Evidence, Verdict
from aggregator.health.layers import neighbours
from aggregator.health.thresholds import Thresholds
from telemetry.presence import Presence
from telemetry.sites import SiteSpec
from telemetry.summary import derive

__all__ = ["EXPLODING", "VANISHING"]


def _judge(
    step: MergedStep,
    thresholds: Thresholds,
    order: Mapping[int, int],
    *,
    severity: Callable[[float], float],
) -> Verdict:
    """Judge each pair under the id of the site that lies farther from the loss."""
    packet, rms = step.packet, np.asarray(derive("rms", step.packet.ints, step.packet.floats), dtype=np.float64)
    judged, found = set(), []
    for lower, upper in neighbours(_judged_rows(step, rms), step.sites):
        # No gradient at all nearer to the loss: then what there is came by another way.
        if rms[upper] > 0.0:
            ratio, site_id = float(rms[lower] / rms[upper]), int(packet.sites[lower])
            judged.add(site_id)
            if severity(ratio) > thresholds.gradient_ratio:
                found.append((-severity(ratio), order[site_id], site_id, _evidence(step, rms, lower, upper)))
    return Verdict(frozenset(judged), {site_id: evidence for _, _, site_id, evidence in sorted(found, key=_first)})


def _first(found: tuple[float, int, int, Evidence]) -> tuple[float, int]:
    return found[:2]


def _judged_rows(step: MergedStep, rms: NDArray[np.float64]) -> list[int]:
    seen = (step.packet.presence == Presence.OBSERVED) & np.isfinite(rms)
    return [row for row in np.flatnonzero(seen).tolist() if _is_judged(step.sites[row])]


def _is_judged(site: SiteSpec) -> bool:
    # Of vectors, some have gradients that are rounding noise: the bias of attention keys, for one.
    return site.kind == "activation_grad" or (site.kind == "gradient" and len(site.shape) >= 2)


def _evidence(step: MergedStep, rms: NDArray[np.float64], lower: int, upper: int) -> Evidence:
    ratio = float(rms[lower] / rms[upper])
    return {
        "rms": float(rms[lower]),
        "neighbour": step.sites[upper].name,
        "neighbour_rms": float(rms[upper]),
        # Of two subnormal numbers the ratio may overflow, and JSON has no infinity.
        "ratio": ratio if np.isfinite(ratio) else None,
    }


def _describe(evidence: Evidence) -> str:
    ratio = "more than 1e308" if evidence["ratio"] is None else f"{evidence['ratio']:.3g}"
    return (
        f"rms {evidence['rms']:.3g} is {ratio} times that of {evidence['neighbour']} ({evidence['neighbour_rms']:.3g})"
    )


def _shrinkage(ratio: float) -> float:
    return 1.0 / ratio if ratio > 0.0 else float("inf")


EXPLODING: Final = Check(
    "gradient_exploding", partial(_judge, severity=float), _describe, limits=("gradient_ratio",), is_immediate=True
)
VANISHING: Final = Check(
    "gradient_vanishing", partial(_judge, severity=_shrinkage), _describe, limits=("gradient_ratio",), is_immediate=True
)
