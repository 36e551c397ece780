"""Tensors to the float64 elements that the oracle takes, and comparisons with what it says."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from telemetry.summary import HistogramDescriptor, TensorSummary
from telemetry.summary.fields import FLOAT_FIELDS, INT_FIELDS
from telemetry.summary.reference import reference_counts, reference_row

GRIDS = [HistogramDescriptor(bins_per_octave=b) for b in (1, 2, 4, 8)]
WIDEST_GRID = HistogramDescriptor(bins_per_octave=8, lo_exp=-126, hi_exp=127)
FLOAT8 = [
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
]
INTEGERS = [
    *(torch.uint8, torch.int8, torch.uint16, torch.int16),
    *(torch.uint32, torch.int32, torch.uint64, torch.int64),
]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


# The oracle is slow and several backends ask it the same.
@functools.lru_cache(maxsize=64)
def _counts(values: bytes, grid: HistogramDescriptor) -> np.ndarray:
    return reference_counts(np.frombuffer(values, np.float64), grid)


def elements(tensor: Tensor) -> np.ndarray:
    """Every element as float64; call it before a test turns denormals off."""
    tensor = tensor.detach()
    if tensor.is_floating_point() and tensor.dtype.itemsize < 4:
        tensor = tensor.to(torch.float32)
    return tensor.to(torch.float64).numpy().reshape(-1)


def every_pattern(dtype: torch.dtype) -> Tensor:
    """All bit patterns of an 8- or 16-bit dtype."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)


def assert_counts_equal(summary: TensorSummary, values: np.ndarray) -> None:
    """Integers, extremes and every bin are those of the oracle, exactly."""
    ints, floats = reference_row(values)
    for name, expected in zip(INT_FIELDS, ints.tolist(), strict=True):
        assert getattr(summary, name) == expected, name
    if summary.finite:
        for name in ("min", "max", "absmax"):
            assert getattr(summary, name) == floats[FLOAT_FIELDS.index(name)], name
    if summary.histogram is not None:
        expected_counts = _counts(values.tobytes(), summary.histogram.descriptor)
        np.testing.assert_array_equal(summary.histogram.counts, expected_counts)


def assert_floats_close(summary: TensorSummary, values: np.ndarray) -> None:
    """Sums to 1e-12 of the sum of magnitudes, m2 to 1e-11, m3 and m4 to 1e-9 of their magnitudes."""
    x = values[np.isfinite(values)]
    _, floats = reference_row(values)
    expected = dict(zip(FLOAT_FIELDS, floats.tolist(), strict=True))
    third = float(np.sum(np.abs(x - expected["mean"]) ** 3)) if x.size else 0.0
    tolerances = {
        "sum": 1e-12 * expected["sum_abs"],
        "sum_abs": 1e-12 * expected["sum_abs"],
        "sum_sq": 1e-12 * expected["sum_sq"],
        "mean": 1e-12 * expected["sum_abs"] / max(x.size, 1),
        "m2": 1e-11 * expected["m2"],
        "m3": 1e-9 * third,
        "m4": 1e-9 * expected["m4"],
    }
    for name, tolerance in tolerances.items():
        if summary.finite or name != "mean":
            assert abs(getattr(summary, name) - expected[name]) <= tolerance, name
