"""The ATen backend: a tensor of any device and dtype becomes a packed row, with ordinary torch operators.

It serves every device, and CPUs where the compiled kernel is not there. Two passes over blocks: the first counts and
sums, the second takes central sums about the mean of the first. Both accumulate in float64, so nothing a float32
holds can overflow, and the second pass corrects for the rounding of its pivot. No operator has a data-dependent output
size and nothing is read back, so on an accelerator the host never waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from telemetry.errors import DtypeUnsupportedError
from telemetry.summary import fields as f
from telemetry.summary.histogram import HistogramDescriptor

__all__ = ["REDUCTION_DTYPE", "count_bins_", "reduce_row"]

REDUCTION_DTYPE: Final = "float64"

# Float64 scratch per block: small enough to stay in a CPU's cache, large enough that an accelerator is kept busy.
_BLOCK_ELEMENTS: Final = {"cpu": 1 << 16}
_DEFAULT_BLOCK_ELEMENTS: Final = 1 << 22


def _flat(tensor: Tensor) -> Tensor:
    if tensor.dtype.is_complex:
        raise DtypeUnsupportedError(
            f"a tensor of dtype {tensor.dtype} has no summary",
            remedy="observe its real and imaginary parts or its absolute value; floating, integer, bool are accepted",
        )
    flat = tensor.detach().resolve_neg().reshape(-1)
    # Half types and float8 widen to float32 exactly; bool becomes 0 and 1.
    narrow = flat.dtype is torch.bool or (flat.dtype.is_floating_point and flat.dtype.itemsize < 4)
    return flat.to(torch.float32) if narrow else flat


def _blocks(flat: Tensor, mask: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    size = _BLOCK_ELEMENTS.get(flat.device.type, _DEFAULT_BLOCK_ELEMENTS)
    for start in range(0, flat.numel(), size):
        yield flat[start : start + size], None if mask is None else mask[start : start + size]


def _counted(valid: Tensor | None, what: Tensor) -> Tensor:
    return (what if valid is None else what & valid).sum()


def _is_zero(block: Tensor) -> Tensor:
    """Compare bits, because under flush-denormal a subnormal compares equal to zero."""
    if block.dtype is torch.float32:
        return (block.view(torch.int32) & 0x7FFFFFFF) == 0
    if block.dtype is torch.float64:
        return (block.view(torch.int64) & 0x7FFFFFFFFFFFFFFF) == 0
    return block == 0


def _is_negative(block: Tensor) -> Tensor:
    if block.dtype.is_floating_point:
        return torch.signbit(block) & ~_is_zero(block) & torch.isfinite(block)
    return block < 0


def _first_pass(block: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    finite = torch.isfinite(block)
    kept = finite if valid is None else finite & valid
    x = torch.where(kept, block, 0).to(torch.float64)
    magnitude = x.abs()
    total = torch.full_like(kept.sum(), block.numel()) if valid is None else valid.sum()
    ints = torch.stack(
        (
            total,
            kept.sum(),
            _counted(valid, _is_zero(block)),
            _counted(valid, _is_negative(block)),
            _counted(valid, torch.isnan(block)),
            _counted(valid, torch.isposinf(block)),
            _counted(valid, torch.isneginf(block)),
            torch.zeros_like(total),
        )
    )
    floats = torch.stack(
        (
            torch.where(kept, x, torch.inf).amin(),
            torch.where(kept, x, -torch.inf).amax(),
            magnitude.amax(),
            x.sum(),
            (x * x).sum(),
            magnitude.sum(),
        )
    )
    return ints, floats


def _second_pass(block: Tensor, valid: Tensor | None, pivot: Tensor) -> Tensor:
    kept = torch.isfinite(block)
    if valid is not None:
        kept = kept & valid
    d = torch.where(kept, block.to(torch.float64) - pivot, 0.0)
    square = d * d
    return torch.stack((d.sum(), square.sum(), (square * d).sum(), (square * square).sum()))


def reduce_row(tensor: Tensor, row: Tensor, mask: Tensor | None = None) -> None:
    """Write the summary of ``tensor`` as one call into ``row``.

    Args:
        tensor: any shape, strides and device; floating, integer or bool.
        row: int64 ``[18]`` on the tensor's device, overwritten: 8 counts, then 10 float64 values by their bits.
        mask: bool, same number of elements as ``tensor`` once flattened; False elements do not count.

    Raises:
        DtypeUnsupportedError: the tensor is complex.
    """
    flat = _flat(tensor)
    valid = None if mask is None else mask.reshape(-1)
    ints, floats = row[: f.NUM_INTS], row.view(torch.float64)[f.NUM_INTS :]
    if flat.numel() == 0:
        row.zero_()
        floats[f.MIN], floats[f.MAX] = torch.inf, -torch.inf
        ints[f.CALLS] = 1
        return
    first = [_first_pass(block, part) for block, part in _blocks(flat, valid)]
    counts = torch.stack([i for i, _ in first]).sum(0)
    partial = torch.stack([x for _, x in first])
    ints.copy_(counts)
    ints[f.CALLS] = 1
    floats[f.MIN] = partial[:, 0].amin()
    floats[f.MAX] = partial[:, 1].amax()
    floats[f.ABSMAX] = partial[:, 2].amax()
    floats[f.SUM : f.MEAN] = partial[:, 3:].sum(0)

    n = counts[f.FINITE].clamp(min=1).to(torch.float64)
    mean = floats[f.SUM] / n
    s1, s2, s3, s4 = torch.stack([_second_pass(b, v, mean) for b, v in _blocks(flat, valid)]).sum(0).unbind()
    # Shift the sums from the rounded pivot to the exact mean, which lies s1/n above it.
    shift = s1 / n
    floats[f.MEAN] = mean
    floats[f.M2] = s2 - shift * s1
    floats[f.M3] = s3 - 3 * shift * s2 + 2 * shift * shift * s1
    floats[f.M4] = s4 - 4 * shift * s3 + 6 * shift * shift * s2 - 3 * shift**3 * s1


def _bin_indices(block: Tensor, descriptor: HistogramDescriptor) -> Tensor:
    if block.dtype is torch.float32:
        bits, mantissa_bits, bias = block.view(torch.int32), 23, 127
    else:
        bits, mantissa_bits, bias = block.to(torch.float64).view(torch.int64), 52, 1023
    magnitude = bits & torch.iinfo(bits.dtype).max
    exponent = (magnitude >> mantissa_bits) - bias
    mantissa = magnitude & ((1 << mantissa_bits) - 1)
    b, side = descriptor.bins_per_octave, descriptor.bins_per_side
    part = torch.zeros_like(mantissa)
    for threshold in descriptor.mantissa_thresholds(mantissa_bits):
        part += mantissa >= threshold
    # Distance from the zero count: 1 underflow, 2 … side + 1 the bins, side + 2 overflow, side + 3 infinity.
    distance = ((exponent - descriptor.lo_exp) * b + part + 2).clamp(1, side + 2)
    is_special = exponent == bias + 1
    distance = torch.where(is_special, side + 3, distance)
    distance = torch.where(magnitude == 0, 0, distance)
    index = descriptor.zero_index + torch.where(bits < 0, -distance, distance)
    return torch.where(is_special & (mantissa != 0), descriptor.num_counts - 1, index)


def count_bins_(tensor: Tensor, counts: Tensor, descriptor: HistogramDescriptor, mask: Tensor | None = None) -> None:
    """Add the histogram of ``tensor`` to ``counts`` in place.

    Args:
        tensor: as in :func:`reduce_row`.
        counts: int64 ``[descriptor.num_counts]`` on the tensor's device.
        descriptor: the grid.
        mask: as in :func:`reduce_row`.
    """
    flat = _flat(tensor)
    for block, part in _blocks(flat, None if mask is None else mask.reshape(-1)):
        weight = torch.ones_like(block, dtype=torch.int64) if part is None else part.to(torch.int64)
        counts.scatter_add_(0, _bin_indices(block, descriptor).to(torch.int64), weight)
