"""The signed log2 histogram: one immutable grid, exact counts, and no re-binning.

The edge rule, which every backend follows: a finite value x ≠ 0 with exponent e and significand s (|x| = s · 2^e,
1 ≤ s < 2) falls into octave e and, inside of it, into the part k with 2^(k/b) ≤ s < 2^((k+1)/b), b = bins_per_octave.
Bins are closed at the edge that is nearer to zero, so an exact power of two opens its bin. The significand is compared
with integers, the smallest mantissa on or above each edge, so no logarithm is taken and no backend can differ.

Counts are stored in ascending order of value::

    -inf | -overflow | negative bins, largest magnitude first | -underflow | zero |
    +underflow | positive bins | +overflow | +inf | NaN

Overflow means |x| ≥ 2^hi_exp, underflow 0 < |x| < 2^lo_exp.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from telemetry.errors import ConfigurationError, SketchDescriptorError, SketchDescriptorMismatchError

__all__ = ["DEFAULT_DESCRIPTOR", "Histogram", "HistogramDescriptor", "Quantile"]

NUM_SPECIAL_BINS: Final = 8
_ENCODING: Final = "ascending.v1"
_FLOAT64_MANTISSA_BITS: Final = 52


@dataclass(frozen=True)
class HistogramDescriptor:
    """What a histogram counts, in full; it travels with the data, and two that differ refuse to merge.

    Attributes:
        bins_per_octave: 1, 2, 4 or 8 equal ratios to each power of two.
        lo_exp, hi_exp: the window [2^lo_exp, 2^hi_exp) of magnitudes that have bins of their own, within the
            exponents of a normal float32, so that every dtype can be binned on its bits.
        signed: always true; both signs have their own bins.
        base, version, encoding: of the grid, of this description, and of the order of counts.
    """

    bins_per_octave: int = 4
    lo_exp: int = -48
    hi_exp: int = 16
    signed: bool = True
    base: int = 2
    version: int = 1
    encoding: str = _ENCODING

    def __post_init__(self) -> None:
        if self.bins_per_octave not in (1, 2, 4, 8):
            raise SketchDescriptorError(
                f"bins_per_octave is {self.bins_per_octave!r}", remedy="use 1, 2, 4 or 8 bins to an octave"
            )
        if not -126 <= self.lo_exp < self.hi_exp <= 127:
            raise SketchDescriptorError(
                f"the window [2^{self.lo_exp}, 2^{self.hi_exp}) is not an ascending one inside [2^-126, 2^127]",
                remedy="choose -126 <= lo_exp < hi_exp <= 127",
            )
        if (self.signed, self.base, self.version, self.encoding) != (True, 2, 1, _ENCODING):
            raise SketchDescriptorError(
                f"signed={self.signed}, base={self.base}, version={self.version}, encoding={self.encoding!r} "
                f"is not known here; this version knows signed=True, base=2, version=1, encoding={_ENCODING!r}",
                remedy="read the record with the version of Rankfold that wrote it",
            )

    @property
    def bins_per_side(self) -> int:
        """Number of bins for one sign, special counts not included."""
        return self.bins_per_octave * (self.hi_exp - self.lo_exp)

    @property
    def num_counts(self) -> int:
        """Length of the counts array: both sides and 8 special counts."""
        return 2 * self.bins_per_side + NUM_SPECIAL_BINS

    @property
    def zero_index(self) -> int:
        """Index of the zero count; positive bin k is at ``zero_index + 2 + k``, negative at ``zero_index - 2 - k``."""
        return self.bins_per_side + 3

    def mantissa_thresholds(self, mantissa_bits: int) -> tuple[int, ...]:
        """Return, for each inner edge of an octave, the smallest mantissa that lies on or above it.

        With ``mantissa_bits=23`` and four bins these are the float32 mantissas 1587185, 3474676 and 5719293.
        """
        b = self.bins_per_octave
        one = 1 << mantissa_bits
        thresholds = []
        for k in range(1, b):
            # Smallest t with t^b >= 2^k · one^b, by exact integer square roots (b is a power of two).
            t = (1 << k) * one**b
            for _ in range(b.bit_length() - 1):
                t = math.isqrt(t - 1) + 1
            thresholds.append(t - one)
        return tuple(thresholds)

    def edges(self) -> NDArray[np.float64]:
        """Return the edges of the positive bins, ascending, ``[bins_per_side + 1]`` float64.

        Each is the smallest float64 on or above the exact edge, so that value x is in bin k iff
        ``edges[k] <= x < edges[k + 1]``, without exception.
        """
        octave, part = np.divmod(np.arange(self.bins_per_side + 1, dtype=np.int64), self.bins_per_octave)
        mantissa = np.array([0, *self.mantissa_thresholds(_FLOAT64_MANTISSA_BITS)], dtype=np.int64)
        significand = 1.0 + np.ldexp(mantissa.astype(np.float64), -_FLOAT64_MANTISSA_BITS)
        return np.ldexp(significand[part], (octave + self.lo_exp).astype(np.int32))

    def bounds(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the smallest and the largest value that each count may stand for, both ``[num_counts]`` float64.

        For the bins of positive values the upper bound is not reached, for those of negative ones the lower.
        """
        edges = self.edges()
        lower = np.concatenate(([0.0, 0.0], edges, [np.inf]))
        upper = np.concatenate(([0.0], edges, [np.inf, np.inf]))
        nan = [np.nan]
        return (
            np.concatenate((-upper[:0:-1], lower, nan)),
            np.concatenate((-lower[:0:-1], upper, nan)),
        )

    def to_wire(self) -> dict[str, Any]:
        """Return the descriptor as a JSON-serialisable dictionary."""
        return asdict(self)

    @staticmethod
    def from_wire(wire: dict[str, Any]) -> HistogramDescriptor:
        """Rebuild a descriptor; one of another version refuses."""
        return HistogramDescriptor(**wire)


DEFAULT_DESCRIPTOR: Final = HistogramDescriptor()


@dataclass(frozen=True)
class Quantile:
    """An order statistic as far as a histogram knows it: the exact one lies in ``[lower, upper]``.

    Attributes:
        value: the estimate. Inside the window it is off by a factor of at most ``2 ** (0.5 / bins_per_octave)``.
        lower, upper: bounds of the exact value; equal for zero and ±inf, infinite on one side for overflow.
    """

    value: float
    lower: float
    upper: float


@dataclass(frozen=True, eq=False)
class Histogram:
    """Counts on a grid.

    Attributes:
        descriptor: the grid.
        counts: int64 ``[descriptor.num_counts]``, in ascending order of value; read-only.
    """

    descriptor: HistogramDescriptor
    counts: NDArray[np.int64]

    def __post_init__(self) -> None:
        if self.counts.shape != (self.descriptor.num_counts,) or self.counts.dtype != np.int64:
            raise SketchDescriptorMismatchError(
                f"counts are {self.counts.dtype}{list(self.counts.shape)}, "
                f"the descriptor asks for int64[{self.descriptor.num_counts}]"
            )
        self.counts.setflags(write=False)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Histogram):
            return NotImplemented
        return self.descriptor == other.descriptor and bool(np.array_equal(self.counts, other.counts))

    __hash__ = None  # type: ignore[assignment]

    def merge(self, other: Histogram) -> Histogram:
        """Return the histogram of both populations; exact.

        Raises:
            SketchDescriptorMismatchError: the grids differ.
        """
        if self.descriptor != other.descriptor:
            raise SketchDescriptorMismatchError(
                f"cannot merge histograms on {self.descriptor} and {other.descriptor}",
                remedy="give every rank and every segment the same descriptor",
            )
        return Histogram(self.descriptor, self.counts + other.counts)

    def coarsen(self, bins_per_octave: int) -> Histogram:
        """Return the same counts on a grid of fewer bins to the octave; exact, as its edges are edges here too.

        Raises:
            SketchDescriptorError: ``bins_per_octave`` is not 1, 2, 4 or 8, or more than there are.
        """
        descriptor = replace(self.descriptor, bins_per_octave=bins_per_octave)
        if bins_per_octave > self.descriptor.bins_per_octave:
            raise SketchDescriptorError(
                f"{self.descriptor.bins_per_octave} bins to an octave cannot become {bins_per_octave}",
                remedy="coarsen to as many or fewer; what one bin holds cannot be taken apart",
            )
        side, zero = self.descriptor.bins_per_side, self.descriptor.zero_index
        group = self.descriptor.bins_per_octave // bins_per_octave
        negative, positive = self.counts[2 : side + 2], self.counts[zero + 2 : zero + 2 + side]
        parts = (
            self.counts[:2],
            negative.reshape(-1, group).sum(1),
            self.counts[side + 2 : zero + 2],
            positive.reshape(-1, group).sum(1),
            self.counts[zero + 2 + side :],
        )
        return Histogram(descriptor, np.concatenate(parts))

    def quantile(self, q: float) -> Quantile:
        """Return the q-quantile of all values but NaN: the smallest one that a share of at least q does not exceed.

        Args:
            q: from 0 (the smallest value) to 1 (the largest).

        Returns:
            The estimate with its bounds; NaN for all three where there is no value.

        Raises:
            ConfigurationError: q lies outside of [0, 1].
        """
        if not 0 <= q <= 1:
            raise ConfigurationError(f"the quantile {q} lies outside of [0, 1]", remedy="a median is q=0.5")
        cumulative = np.cumsum(self.counts[:-1])
        if cumulative[-1] == 0:
            return Quantile(math.nan, math.nan, math.nan)
        rank = max(1, math.ceil(q * int(cumulative[-1])))
        index = int(np.searchsorted(cumulative, rank))
        lower, upper = (float(bound[index]) for bound in self.descriptor.bounds())
        return Quantile(_between(lower, upper), lower, upper)

    @property
    def total(self) -> int:
        """Number of values counted, non-finite ones included."""
        return int(self.counts.sum())


def _between(lower: float, upper: float) -> float:
    """Return the value whose ratio to both bounds is alike; the finite bound of an overflow, half an underflow."""
    if lower == upper:
        return lower
    if math.isinf(lower) or math.isinf(upper):
        return lower if math.isinf(upper) else upper
    if lower == 0 or upper == 0:
        return (lower + upper) / 2
    return math.copysign(math.sqrt(lower / upper) * abs(upper), upper)
