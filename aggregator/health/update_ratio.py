"""By how much of its own size a step changes a weight: rms of the realised update over rms of the weight.

Both rows have to be of one step. The weight is the one after the update. Where the update is followed on a sample, its
rms is an estimate; a ratio of root mean squares needs no scaling for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from aggregator.catalogue import MergedStep
from telemetry.presence import Presence
from telemetry.sites import SiteSpec
from telemetry.summary import derive

__all__ = ["UPDATE_TO_WEIGHT", "ratio_of", "update_pairs", "update_ratios"]

UPDATE_TO_WEIGHT: Final = "update_to_weight"
"""Name of the ratio as a field of the kind ``update``."""

Rows = NDArray[np.int64]


def update_pairs(sites: Sequence[SiteSpec]) -> tuple[Rows, Rows]:
    """Return the rows of updates that have a parameter among ``sites``, and the row of each one's parameter."""
    weights = {site.name: row for row, site in enumerate(sites) if site.kind == "parameter"}
    updates = [row for row, site in enumerate(sites) if site.kind == "update" and site.name in weights]
    return np.array(updates, dtype=np.int64), np.array([weights[sites[row].name] for row in updates], dtype=np.int64)


def update_ratios(step: MergedStep, updates: Rows, weights: Rows) -> tuple[Rows, NDArray[np.float64]]:
    """Return the update-to-weight ratio of each pair that was observed, see :func:`update_pairs`.

    Returns:
        Rows of the updates, and float64 ratios, NaN where there is no such number: nothing finite, or a weight that is
        all zero.
    """
    packet = step.packet
    observed = packet.presence == Presence.OBSERVED
    both = observed[updates] & observed[weights]
    updates, weights = updates[both], weights[both]
    rms = np.asarray(derive("rms", packet.ints, packet.floats), dtype=np.float64)
    return updates, ratio_of(rms[updates], rms[weights])


def ratio_of(update_rms: NDArray[np.float64], weight_rms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Divide element by element; NaN where that is no finite number."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratios = update_rms / weight_rms
    return np.where(np.isfinite(ratios), ratios, np.nan)
