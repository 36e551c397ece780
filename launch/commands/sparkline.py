"""A series as one line of characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

__all__ = ["sparkline"]

_BARS: Final = "▁▂▃▄▅▆▇█"
_PLAIN_BARS: Final = "_.-=+*#@"
_ABSENT: Final = "·"


def sparkline(values: Sequence[float | None], width: int = 32, *, unicode: bool = True) -> str:
    """Return at most ``width`` characters, a bar for the mean of the steps that each stands for.

    A dot stands where nothing was observed. A series whose values all lie above zero and span more than two decades is
    drawn on a log scale.
    """
    bars = _BARS if unicode else _PLAIN_BARS
    absent = _ABSENT if unicode else " "
    means = [_mean(part) for part in _parts(values, width)]
    known = [mean for mean in means if mean is not None]
    if not known:
        return absent * len(means)
    if min(known) > 0 and max(known) / min(known) > 100:
        means = [None if mean is None else math.log(mean) for mean in means]
        known = [math.log(mean) for mean in known]
    low, span = min(known), max(known) - min(known)
    return "".join(
        absent if mean is None else bars[min(len(bars) - 1, int((mean - low) / span * len(bars)))] if span else bars[0]
        for mean in means
    )


def _parts(values: Sequence[float | None], width: int) -> list[Sequence[float | None]]:
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)] if count else [0]
    return [values[a:b] for a, b in pairwise(edges)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else None
