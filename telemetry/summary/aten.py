"""The ATen backend: a tensor of any device and dtype becomes a packed row, with ordinary torch operators.

It serves every device, and CPUs where the compiled kernel is not there. Every element is widened to float64, and what
it is (zero, negative, infinite, its bin) is read off the bits of that, so that a flush-denormal mode changes no count.
Two passes over blocks: the first counts and sums, the second takes central sums about the mean of the first and
corrects for the rounding of its pivot. No operator has a data-dependent output size and nothing is read back, so on an
accelerator the host never waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from telemetry.summary import fields as f
from telemetry.summary.dtypes import REDUCTION_DTYPE, dtype_code
from telemetry.summary.histogram import HistogramDescriptor
from telemetry.summary.merge import merge_floats
from telemetry.summary.quantization import QUANTIZATION_WORDS, SUM_SQ_ERROR, TargetFormat

__all__ = ["REDUCTION_DTYPE", "accumulate_row", "add_quantization_", "count_bins_", "reduce_row"]

# Elements in a block: small enough that scratch stays in a CPU's cache, large enough to keep an accelerator busy.
_BLOCK_ELEMENTS: Final = {"cpu": 1 << 16}
_DEFAULT_BLOCK_ELEMENTS: Final = 1 << 22

_MAGNITUDE: Final = 0x7FFFFFFFFFFFFFFF
_INFINITY: Final = 0x7FF0000000000000
_MANTISSA_BITS: Final = 52
_MANTISSA: Final = (1 << _MANTISSA_BITS) - 1


@dataclass(frozen=True)
class _Block:
    """Some elements: ``x`` float64, ``bits`` the same as int64, and how often each counts (None: once)."""

    x: Tensor
    bits: Tensor
    weight: Tensor | None

    @property
    def magnitude(self) -> Tensor:
        return self.bits & _MAGNITUDE

    def kept(self) -> Tensor:
        finite = self.magnitude < _INFINITY
        return finite if self.weight is None else finite & (self.weight != 0)

    def sum(self, what: Tensor) -> Tensor:
        return what.sum() if self.weight is None else (what * self.weight).sum()


def _widen(flat: Tensor) -> Tensor:
    """Return float64. A CPU that flushes denormals would take a float32 subnormal for zero, so it goes by its bits."""
    if flat.is_floating_point() and flat.dtype.itemsize < 4:
        flat = flat.to(torch.float32)
    if flat.dtype is not torch.float32 or flat.device.type != "cpu":
        return flat.to(torch.float64)
    bits = flat.view(torch.int32)
    subnormal = (bits & 0x7FFFFF).to(torch.float64) * 2.0**-149
    subnormal = torch.where(bits < 0, -subnormal, subnormal)
    return torch.where((bits & 0x7F800000) == 0, subnormal, flat.to(torch.float64))


def _blocks(tensor: Tensor, weight: Tensor | None) -> Iterator[_Block]:
    dtype_code(tensor.dtype)
    flat = tensor.detach().resolve_neg().reshape(-1)
    if weight is not None:
        # Wide enough that no product or sum of multiplicities wraps around.
        weight = (weight if weight.dtype is torch.bool else weight.to(torch.int64)).reshape(-1)
    size = _BLOCK_ELEMENTS.get(flat.device.type, _DEFAULT_BLOCK_ELEMENTS)
    for start in range(0, flat.numel(), size):
        x = _widen(flat[start : start + size])
        yield _Block(x, x.view(torch.int64), None if weight is None else weight[start : start + size])


def _first_pass(block: _Block) -> tuple[Tensor, Tensor]:
    magnitude, kept = block.magnitude, block.kept()
    x = torch.where(kept, block.x, 0.0)
    special = magnitude >= _INFINITY
    is_nan, is_inf = magnitude > _INFINITY, magnitude == _INFINITY
    below = block.bits < 0
    total = torch.full_like(kept.sum(), block.x.numel()) if block.weight is None else block.weight.sum()
    ints = (
        total,
        total - block.sum(special),
        block.sum(magnitude == 0),
        block.sum(below & ~special & (magnitude != 0)),
        block.sum(is_nan),
        block.sum(is_inf & ~below),
        block.sum(is_inf & below),
        torch.zeros_like(total),
    )
    floats = (
        torch.where(kept, block.x, torch.inf).amin(),
        torch.where(kept, block.x, -torch.inf).amax(),
        x.abs().amax(),
        block.sum(x),
        block.sum(x * x),
        block.sum(x.abs()),
    )
    return torch.stack(ints), torch.stack(floats)


def _second_pass(block: _Block, pivot: Tensor) -> Tensor:
    d = torch.where(block.kept(), block.x - pivot, 0.0)
    square = d * d
    return torch.stack((block.sum(d), block.sum(square), block.sum(square * d), block.sum(square * square)))


def _write_central(floats: Tensor, n: Tensor, sums: Tensor) -> None:
    """Shift the central sums from the rounded pivot to the exact mean, which lies s1/n above it."""
    s1, s2, s3, s4 = sums.unbind()
    shift = s1 / n
    floats[f.M2] = (s2 - shift * s1).clamp(min=0)
    floats[f.M3] = s3 - 3 * shift * s2 + 2 * shift * shift * s1
    floats[f.M4] = (s4 - 4 * shift * s3 + 6 * shift * shift * s2 - 3 * shift**3 * s1).clamp(min=0)


def reduce_row(tensor: Tensor, row: Tensor, mask: Tensor | None = None) -> None:
    """Write the summary of ``tensor`` as one call into ``row``.

    Args:
        tensor: any shape, strides and device; floating, integer or bool.
        row: int64 ``[18]`` on the tensor's device, overwritten: 8 counts, then 10 float64 values by their bits.
        mask: same shape as ``tensor``; bool, False elements do not count, or integer, how often each element counts.

    Raises:
        DtypeUnsupportedError: the tensor is complex.
    """
    ints, floats = row[: f.NUM_INTS], row.view(torch.float64)[f.NUM_INTS :]
    first = [_first_pass(block) for block in _blocks(tensor, mask)]
    row.zero_()
    ints[f.CALLS] = 1
    if not first:
        floats[f.MIN], floats[f.MAX] = torch.inf, -torch.inf
        return
    counts = torch.stack([counted for counted, _ in first]).sum(0)
    partial = torch.stack([summed for _, summed in first])
    ints[: f.CALLS] = counts[: f.CALLS]
    # Adding zero makes an extreme of -0 a +0: which of the two was met first says nothing.
    floats[f.MIN] = partial[:, 0].amin() + 0.0
    floats[f.MAX] = partial[:, 1].amax() + 0.0
    floats[f.ABSMAX] = partial[:, 2].amax()
    floats[f.SUM : f.MEAN] = partial[:, 3:].sum(0)
    n = counts[f.FINITE].clamp(min=1).to(torch.float64)
    mean = floats[f.SUM] / n
    floats[f.MEAN] = mean
    _write_central(floats, n, torch.stack([_second_pass(b, mean) for b in _blocks(tensor, mask)]).sum(0))


def accumulate_row(row: Tensor, fresh: Tensor) -> None:
    """Merge the row ``fresh`` into ``row``, both int64 ``[..., 18]`` on one device; ``row`` is the earlier one."""
    a, b = (r.view(torch.float64)[..., f.NUM_INTS :] for r in (row, fresh))
    merged = merge_floats(torch, row[..., f.FINITE], a, fresh[..., f.FINITE], b)
    a.copy_(merged)
    row[..., : f.NUM_INTS] += fresh[..., : f.NUM_INTS]


def _count_indices(block: _Block, descriptor: HistogramDescriptor) -> Tensor:
    magnitude = block.magnitude
    mantissa = magnitude & _MANTISSA
    b, side = descriptor.bins_per_octave, descriptor.bins_per_side
    step = ((magnitude >> _MANTISSA_BITS) - 1023 - descriptor.lo_exp) * b
    for threshold in descriptor.mantissa_thresholds(_MANTISSA_BITS):
        step += mantissa >= threshold
    # Distance from the zero count: 1 underflow, 2 … side + 1 the bins, side + 2 overflow, side + 3 infinity.
    distance = (step + 2).clamp(1, side + 2)
    distance = torch.where(magnitude == _INFINITY, side + 3, distance)
    distance = torch.where(magnitude == 0, 0, distance)
    index = descriptor.zero_index + torch.where(block.bits < 0, -distance, distance)
    return torch.where(magnitude > _INFINITY, descriptor.num_counts - 1, index)


def count_bins_(tensor: Tensor, counts: Tensor, descriptor: HistogramDescriptor, mask: Tensor | None = None) -> None:
    """Add the histogram of ``tensor`` to ``counts`` in place.

    Args:
        tensor, mask: as in :func:`reduce_row`.
        counts: int64 ``[descriptor.num_counts]`` on the tensor's device.
        descriptor: the grid.
    """
    for block in _blocks(tensor, mask):
        weight = torch.ones_like(block.bits) if block.weight is None else block.weight.to(torch.int64)
        counts.scatter_add_(0, _count_indices(block, descriptor), weight)


def _loss_of_cast(block: _Block, target: TargetFormat) -> tuple[Tensor, Tensor]:
    """Return the counts, int64 ``[3]``, and the squared error; rounds as the C kernel does, see ``round_to`` there."""
    magnitude = torch.where(block.kept(), block.x.abs(), 0.0)
    bounded = magnitude.clamp(max=2 * target.max_finite)
    exponent = bounded.clamp(min=2.0**target.min_exponent).view(torch.int64) & _INFINITY
    shift = (exponent + ((_MANTISSA_BITS - target.mantissa_bits) << _MANTISSA_BITS)).view(torch.float64)
    rounded = (bounded + shift) - shift
    lost = magnitude - rounded.clamp(max=target.max_finite)
    counts = (
        block.sum((rounded == 0) & (magnitude.view(torch.int64) != 0)),
        block.sum(rounded > target.max_finite),
        block.sum(rounded >= target.max_finite),
    )
    return torch.stack(counts), block.sum(lost * lost)


def add_quantization_(tensor: Tensor, words: Tensor, target: TargetFormat, mask: Tensor | None = None) -> None:
    """Add what a cast to ``target`` would lose to ``words``, int64 ``[4]``; see ``telemetry.summary.quantization``."""
    error = words.view(torch.float64)[SUM_SQ_ERROR:QUANTIZATION_WORDS]
    for block in _blocks(tensor, mask):
        counts, squared = _loss_of_cast(block, target)
        words[:SUM_SQ_ERROR] += counts
        error += squared
