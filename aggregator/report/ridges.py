"""Histograms of a site over time for a chart: shapes on a signed log2 axis, and shares of what has no place there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from aggregator.history import History
from telemetry.errors import HistogramAbsentError
from telemetry.summary import Histogram, HistogramDescriptor

__all__ = [
    "BANDS",
    "MAX_RIDGES",
    "Ridges",
    "evenly_chosen",
    "histogram_steps",
    "read_one_ridges",
    "read_ridges",
    "shown_share",
]

BANDS: Final = ("zero", "underflow", "overflow", "NaN", "±inf")
"""What a histogram counts outside of its bins, in the order of :attr:`Ridges.shares`."""

MAX_RIDGES: Final = 12
"""Histograms of one site on one chart."""

RIDGE_OVERLAP: Final = 1.7
"""Height of the highest bin of a ridgeline, in rows."""

RIDGE_GAP: Final = 0.5
"""Half the width of the gap between negative and positive values, in octaves."""

BINS_PER_OCTAVE: Final = 2
"""Of a chart, at the most."""

_MAX_TICKS_PER_SIDE: Final = 4


@dataclass(frozen=True, eq=False)
class Ridges:
    """Histograms of one site.

    Attributes:
        site, kind: which.
        steps: int64 ``[n]``, ascending.
        x: float64 ``[bins]``, place of each bin: octaves above the lowest occupied one, negative values mirrored.
        heights: float64 ``[n, bins]``, share of all elements in a bin, over the largest of all steps.
        shares: float64 ``[n, 5]``, share of all elements in each of :data:`BANDS`.
        ticks: places on the axis, and the power of two that is written there.
    """

    site: str
    kind: str
    steps: NDArray[np.int64]
    x: NDArray[np.float64]
    heights: NDArray[np.float64]
    shares: NDArray[np.float64]
    ticks: tuple[tuple[float, str], ...]


def histogram_steps(history: History, sites: str | Iterable[str] | None = None, kinds: str | None = None) -> list[int]:
    """Return all steps that have histograms, ascending.

    Raises:
        SiteUnknownError, KindUnknownError: with near names.
    """
    found: set[int] = set()
    where = pc.field("hist_bins").is_valid()
    for batch in history.observation_batches(sites, kinds, columns=["step", "hist_bins"], where=where):
        found.update(pc.unique(batch["step"]).to_pylist())
    return sorted(found)


def evenly_chosen(steps: Sequence[int], max_steps: int) -> list[int]:
    """Return at most ``max_steps`` of the steps, evenly among them, the first and the last included."""
    if len(steps) <= max_steps:
        return list(steps)
    return [steps[i] for i in np.unique(np.linspace(0, len(steps) - 1, max_steps).round().astype(int))]


def read_ridges(
    history: History, steps: Sequence[int], *, sites: str | Iterable[str] | None = None, kinds: str | None = None
) -> list[Ridges]:
    """Read the histograms of every site at these steps, in one pass over the record; sites without one are left out.

    Raises:
        SiteUnknownError, KindUnknownError: with near names.
    """
    counts: dict[tuple[str, str], dict[int, NDArray[np.int64]]] = {}
    columns = ["step", "site", "kind", "hist_bins", "hist_counts"]
    where = pc.field("hist_bins").is_valid()
    size = history.descriptor.num_counts
    for batch in history.observation_batches(sites, kinds, steps, columns, where=where):
        keys = zip(batch["kind"].to_pylist(), batch["site"].to_pylist(), batch["step"].to_pylist(), strict=True)
        for i, (kind, site, step) in enumerate(keys):
            row = counts.setdefault((kind, site), {})[step] = np.zeros(size, np.int64)
            row[batch["hist_bins"][i].values.to_numpy()] = batch["hist_counts"][i].values.to_numpy()
    return [_ridges(site, kind, by_step, history.descriptor) for (kind, site), by_step in counts.items()]


def read_one_ridges(history: History, site: str, kind: str) -> Ridges:
    """Read the histograms of one site at up to twelve of its steps.

    Raises:
        SiteUnknownError, KindUnknownError: with near names.
        HistogramAbsentError: it has none.
    """
    for ridges in read_ridges(
        history, evenly_chosen(histogram_steps(history, site, kind), MAX_RIDGES), sites=site, kinds=kind
    ):
        return ridges
    raise HistogramAbsentError(
        f"{kind} {site} has no histogram", site=site, remedy="histograms are counted every `hist_every` steps"
    )


def shown_share(share: float) -> str:
    """Return a share (0 to 1) in percent; ``0`` means not one element."""
    return "0" if share == 0 else "<0.01 %" if share < 1e-4 else f"{100 * share:.3g} %"


def _ridges(site: str, kind: str, by_step: dict[int, NDArray[np.int64]], descriptor: HistogramDescriptor) -> Ridges:
    steps = sorted(by_step)
    fewer = min(BINS_PER_OCTAVE, descriptor.bins_per_octave)
    coarse = [Histogram(descriptor, by_step[step]).coarsen(fewer) for step in steps]
    grid = coarse[0].descriptor
    counts = np.array([histogram.counts for histogram in coarse], np.float64)
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    side, zero = grid.bins_per_side, grid.zero_index
    positive, negative = share[:, zero + 2 : zero + 2 + side], share[:, 2 : 2 + side][:, ::-1]
    used = np.flatnonzero((positive + negative).any(0))
    low, high = (int(used[0]) // fewer * fewer, -(-int(used[-1] + 1) // fewer) * fewer) if len(used) else (0, fewer)
    heights = np.concatenate((negative[:, low:high][:, ::-1], positive[:, low:high]), axis=1)
    away = RIDGE_GAP + (np.arange(high - low) + 0.5) / fewer
    shares = (
        share[:, zero],
        share[:, zero - 1] + share[:, zero + 1],
        share[:, 1] + share[:, zero + 2 + side],
        share[:, -1],
        share[:, 0] + share[:, -2],
    )
    return Ridges(
        site=site,
        kind=kind,
        steps=np.array(steps, np.int64),
        x=np.concatenate((-away[::-1], away)),
        heights=heights / (heights.max() or 1.0),
        shares=np.stack(shares, axis=1),
        ticks=_ticks(grid.lo_exp + low // fewer, (high - low) // fewer),
    )


def _ticks(first_octave: int, num_octaves: int) -> tuple[tuple[float, str], ...]:
    each = max(1, -(-num_octaves // _MAX_TICKS_PER_SIDE))
    places = [
        (RIDGE_GAP + octave, f"2<sup>{first_octave + octave}</sup>") for octave in range(each, num_octaves + 1, each)
    ]
    middle = (0.0, f"±2<sup>{first_octave}</sup>")
    return (*((-place, f"−{text}") for place, text in reversed(places)), middle, *places)
