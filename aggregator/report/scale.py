"""How a field becomes a colour: which scale it is read on, what its ticks are, and what it is measured in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from aggregator.health.update_ratio import UPDATE_TO_WEIGHT
from aggregator.report.grid import NONFINITE
from telemetry.summary import INT_FIELDS

__all__ = ["Scale", "field_label", "scale_of", "shown_number"]

_SIGNED: Final = frozenset({"min", "max", "sum", "mean", "m3", "skewness", "kurtosis"})
_FRACTIONS: Final = frozenset({"zero_fraction", "finite_fraction"})
_SQUARED: Final = {"sum_sq": 2, "var": 2, "m2": 2, "m3": 3, "m4": 4}
_MAX_TICKS: Final = 7


@dataclass(frozen=True)
class Scale:
    """From values to the numbers that are coloured.

    Attributes:
        kind: ``log`` (log10, values above zero), ``symlog`` (sign(x) · log10(1 + |x| / unit)) or ``linear``.
        unit: of ``symlog``: magnitudes below it are shown nearly linearly.
        low, high: ends of the colour scale, transformed.
        ticks: places on the colour scale, transformed, and what is written there.
    """

    kind: Literal["log", "symlog", "linear"]
    unit: float
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]

    @property
    def is_signed(self) -> bool:
        """Whether zero lies in the middle of the colours."""
        return self.kind == "symlog"

    def transform(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the numbers to colour; NaN where there is none, and for zero on a logarithmic scale."""
        with np.errstate(divide="ignore", invalid="ignore"):
            if self.kind == "log":
                return np.where(values > 0, np.log10(values), np.nan)
            if self.kind == "symlog":
                return np.asarray(np.sign(values) * np.log10(1 + np.abs(values) / self.unit))
        return values


def scale_of(field: str, values: NDArray[np.float64]) -> Scale:
    """Choose the scale of a field by its meaning, and its ends by its finite values."""
    finite = values[np.isfinite(values)]
    if field in _FRACTIONS:
        return Scale("linear", 1.0, 0.0, 1.0, tuple((t, f"{t:g}") for t in (0.0, 0.25, 0.5, 0.75, 1.0)))
    magnitudes = np.abs(finite[finite != 0])
    low, high = (float(magnitudes.min()), float(magnitudes.max())) if len(magnitudes) else (0.1, 1.0)
    if field in _SIGNED:
        unit = high * float(np.clip(low / high, 1e-4, 1e-2))
        end = float(np.log10(1 + high / unit))
        decades = _decades(np.log10(unit), np.log10(high))
        places = [(float(np.log10(1 + 10.0**d / unit)), d) for d in decades]
        ticks = [*((-place, f"−{_power(d)}") for place, d in reversed(places)), (0.0, "0")]
        return Scale("symlog", unit, -end, end, (*ticks, *((place, _power(d)) for place, d in places)))
    ends = float(np.log10(low)), float(np.log10(high))
    if ends[1] - ends[0] < 0.02:
        ends = ends[0] - 0.5, ends[1] + 0.5
    decades = _decades(*ends)
    ticks = [(float(d), _power(d)) for d in decades]
    if len(ticks) < 2:
        ticks = [(place, f"{10**place:.2g}") for place in np.linspace(*ends, 4).tolist()]
    return Scale("log", 1.0, *ends, tuple(ticks))


def field_label(field: str) -> str:
    """Return the field with its unit: elements of a tensor have none of their own, so theirs is written "x"."""
    if field in INT_FIELDS or field == NONFINITE:
        return f"{field} (calls)" if field == "calls" else f"{field} (elements)"
    if field == UPDATE_TO_WEIGHT:
        return "rms(update) / rms(weight)"
    if field in _FRACTIONS:
        return f"{field} (share of elements)"
    if field in ("skewness", "kurtosis"):
        return f"{field} (no unit)"
    power = _SQUARED.get(field, 1)
    return f"{field} (unit of the tensor{'' if power == 1 else '²³⁴'[power - 2]})"


def shown_number(value: float | None) -> str:
    """Return a number in four digits as people read it, – for none."""
    if value is None or np.isnan(value):
        return "–"
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    return f"{value:.4g}"


def _decades(low: float, high: float) -> list[int]:
    first, last = int(np.ceil(low - 1e-9)), int(np.floor(high + 1e-9))
    return list(range(first, last + 1, max(1, -(-(last - first + 1) // _MAX_TICKS))))


def _power(exponent: int) -> str:
    return f"{10.0**exponent:g}" if -3 <= exponent <= 4 else f"1e{exponent}"
