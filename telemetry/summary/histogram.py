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
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from telemetry.errors import SketchDescriptorError, SketchDescriptorMismatchError

__all__ = ["DEFAULT_DESCRIPTOR", "Histogram", "HistogramDescriptor"]

NUM_SPECIAL_BINS: Final = 8
_ENCODING: Final = "ascending.v1"


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
        """Return the edges of the positive bins, ascending, ``[bins_per_side + 1]`` float64."""
        steps = np.arange(self.bins_per_side + 1, dtype=np.int64)
        octave, part = np.divmod(steps, self.bins_per_octave)
        return np.ldexp(np.exp2(part / self.bins_per_octave), (octave + self.lo_exp).astype(np.int32))

    def to_wire(self) -> dict[str, Any]:
        """Return the descriptor as a JSON-serialisable dictionary."""
        return asdict(self)

    @staticmethod
    def from_wire(wire: dict[str, Any]) -> HistogramDescriptor:
        """Rebuild a descriptor; one of another version refuses."""
        return HistogramDescriptor(**wire)


DEFAULT_DESCRIPTOR: Final = HistogramDescriptor()


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

    @property
    def total(self) -> int:
        """Number of values counted, non-finite ones included."""
        return int(self.counts.sum())
