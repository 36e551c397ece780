"""The oracle: what every backend must compute, written to be obviously right and not to be fast.

It takes the elements as float64, which holds every floating type and every integer up to 2^53 without rounding; wider
integers count as the float64 nearest to them. Sums are exactly rounded (``math.fsum``), the mean is kept in two parts
so that its own rounding cannot reach the central sums, and the bin of a value is decided with integers of any size,
without the thresholds that the fast backends compare with. Nothing but tests calls this.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from telemetry.summary import fields as f
from telemetry.summary.histogram import HistogramDescriptor
from telemetry.summary.quantization import QUANTIZATION_WORDS, TargetFormat

__all__ = ["reference_counts", "reference_quantization", "reference_row"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_SIGNIFICAND_BITS: Final = 53


def _fsum(values: Floats) -> float:
    try:
        return math.fsum(values)
    except OverflowError:
        return math.copysign(math.inf, float(values.sum()))


def _central_sums(x: Floats, mean: float) -> tuple[float, float, float]:
    rest = _fsum(x - mean) / x.size
    d = (x - mean) - rest
    return _fsum(d**2), _fsum(d**3), _fsum(d**4)


def reference_row(values: Floats) -> tuple[Ints, Floats]:
    """Return the summary of one call.

    Args:
        values: the elements that count, float64, any shape.

    Returns:
        int64 ``[8]`` and float64 ``[10]``, laid out as in ``telemetry.summary.fields``.
    """
    values = values.reshape(-1)
    x = values[np.isfinite(values)]
    ints = np.zeros(f.NUM_INTS, dtype=np.int64)
    ints[f.TOTAL], ints[f.FINITE], ints[f.CALLS] = values.size, x.size, 1
    ints[f.ZERO], ints[f.NEGATIVE] = np.sum(x == 0), np.sum(x < 0)
    ints[f.NAN], ints[f.POS_INF], ints[f.NEG_INF] = (
        np.sum(np.isnan(values)),
        np.sum(values == np.inf),
        np.sum(values == -np.inf),
    )
    floats = np.zeros(f.NUM_FLOATS, dtype=np.float64)
    floats[f.MIN], floats[f.MAX] = np.inf, -np.inf
    if x.size == 0:
        return ints, floats
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        # Adding zero makes an extreme of -0 a +0: which of the two was met first says nothing.
        floats[f.MIN], floats[f.MAX], floats[f.ABSMAX] = x.min() + 0.0, x.max() + 0.0, np.abs(x).max()
        floats[f.SUM], floats[f.SUM_SQ], floats[f.SUM_ABS] = _fsum(x), _fsum(x * x), _fsum(np.abs(x))
        floats[f.MEAN] = floats[f.SUM] / x.size
        floats[f.M2], floats[f.M3], floats[f.M4] = _central_sums(x, float(floats[f.MEAN]))
    return ints, floats


def _floor_log2_times(magnitude: float, b: int) -> int:
    """Return ⌊log2(magnitude) · b⌋ exactly: magnitude^b is m^b · 2^(e·b), and an integer knows its bit length."""
    fraction, exponent = math.frexp(magnitude)
    m = int(math.ldexp(fraction, _SIGNIFICAND_BITS))
    power: int = m**b
    return power.bit_length() - 1 + (exponent - _SIGNIFICAND_BITS) * b


def _count_index(value: float, descriptor: HistogramDescriptor) -> int:
    if math.isnan(value):
        return descriptor.num_counts - 1
    sign = -1 if value < 0 else 1
    if math.isinf(value):
        return descriptor.zero_index + sign * (descriptor.bins_per_side + 3)
    if value == 0:
        return descriptor.zero_index
    b = descriptor.bins_per_octave
    step = _floor_log2_times(abs(value), b) - descriptor.lo_exp * b
    return descriptor.zero_index + sign * (min(max(step, -1), descriptor.bins_per_side) + 2)


def reference_counts(values: Floats, descriptor: HistogramDescriptor) -> Ints:
    """Return the counts, int64 ``[descriptor.num_counts]``, of float64 ``values`` of any shape."""
    counts = np.zeros(descriptor.num_counts, dtype=np.int64)
    for value in values.reshape(-1).tolist():
        counts[_count_index(value, descriptor)] += 1
    return counts


def _magnitudes(target: TargetFormat) -> Floats:
    """Return every non-negative finite value of a format in order of its code, and the one that would come next."""
    codes = 1 << target.mantissa_bits
    subnormals = [math.ldexp(k, target.min_exponent - target.mantissa_bits) for k in range(codes)]
    values, exponent = subnormals, target.min_exponent
    while values[-1] <= target.max_finite:
        values += [math.ldexp(codes + k, exponent - target.mantissa_bits) for k in range(codes)]
        exponent += 1
    count = sum(value <= target.max_finite for value in values)
    return np.array(values[: count + 1])


def reference_quantization(values: Floats, target: TargetFormat) -> Ints:
    """Return the packed loss, int64 ``[4]``, of casting float64 ``values`` of any shape to ``target``."""
    magnitude = np.abs(values.reshape(-1))
    magnitude = magnitude[np.isfinite(magnitude)]
    grid = _magnitudes(target)
    below = np.minimum(np.searchsorted(grid, magnitude, side="right") - 1, grid.size - 2)
    middle = (grid[below] + grid[below + 1]) / 2
    up = (magnitude > middle) | ((magnitude == middle) & (below % 2 == 1))
    rounded = grid[below + up]
    with np.errstate(over="ignore"):
        error = magnitude - np.minimum(rounded, target.max_finite)
        words = np.zeros(QUANTIZATION_WORDS, dtype=np.int64)
        words[0] = np.sum((rounded == 0) & (magnitude != 0))
        words[1] = np.sum(rounded > target.max_finite)
        words[2] = np.sum(rounded >= target.max_finite)
        words.view(np.float64)[3] = _fsum(error * error)
    return words
