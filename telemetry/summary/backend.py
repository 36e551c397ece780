"""Which code reduces a tensor, and the one door to it: the C kernel for CPU tensors where it was built, else ATen.

All backends agree on every integer to the last count. The builds of the C kernel also agree on every bit of the floats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

import torch
from torch import Tensor

from telemetry.errors import ConfigurationError
from telemetry.summary import aten
from telemetry.summary.dtypes import ITEM_SIZES, dtype_code
from telemetry.summary.fields import ROW_WORDS
from telemetry.summary.histogram import HistogramDescriptor
from telemetry.summary.quantization import TargetFormat

try:
    from telemetry.summary import _kernel

    _BUILDS: Final = _kernel.BUILDS
except ImportError:
    _BUILDS: Final = ()  # type: ignore[misc]

__all__ = [
    "available_backends",
    "backend_name",
    "kernel_fingerprint",
    "reduce_into",
    "reduce_many_into",
    "using_backend",
]

# Index into the kernel's builds, the best one first; None is ATen.
_build: ContextVar[int | None] = ContextVar("rankfold_summary_build", default=0 if _BUILDS else None)

_NO_GRID: Final = (0, 0, 0)
_NO_TARGET: Final = (0, 0, 0.0)
_PLAIN: Final = (Tensor, torch.nn.Parameter)


def available_backends() -> tuple[str, ...]:
    """Return the backends that work here, the fastest first: of ``c-avx512 c-avx2 c-baseline aten``."""
    return (*(f"c-{build}" for build in _BUILDS), "aten")


def backend_name(device: torch.device | str) -> str:
    """Return the backend that reduces tensors of ``device``, for the plan and the run record."""
    build = _build.get()
    return "aten" if build is None or torch.device(device).type != "cpu" else f"c-{_BUILDS[build]}"


@contextmanager
def using_backend(name: str) -> Iterator[None]:
    """Reduce with one backend inside of the block, in this context alone; tests and benchmarks call this.

    Raises:
        ConfigurationError: the backend does not work here.
    """
    if name not in available_backends():
        raise ConfigurationError(
            f"the backend {name!r} does not work here; available are {', '.join(available_backends())}",
            remedy="choose one of those, or reinstall with a C compiler present to build the kernel",
        )
    token = _build.set(None if name == "aten" else available_backends().index(name))
    try:
        yield
    finally:
        _build.reset(token)


def _has_plain_memory(tensor: Tensor) -> bool:
    """Whether the elements lie at the tensor's address: not for subclasses with their own dispatch, nor sparse."""
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        return False
    return type(tensor) in _PLAIN or type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def _lies_dense(tensor: Tensor, address: int, code: int) -> bool:
    return tensor.is_contiguous() and not address % ITEM_SIZES[code] and not tensor.is_neg()


def _dense(tensor: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the elements, and the mask in the same order, without gaps; copies only where there are gaps.

    The order of elements means nothing to a summary, so a permuted dense tensor is read as it lies in memory.
    """
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if not tensor.is_contiguous():
        tensor = tensor.detach()
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        permuted = tensor.permute(order)
        if permuted.is_contiguous():
            tensor, mask = permuted, None if mask is None else mask.permute(order)
        else:
            tensor = tensor.contiguous()
    if tensor.data_ptr() % tensor.element_size():
        tensor = tensor.detach().clone()
    return tensor, None if mask is None else mask.contiguous()


def reduce_into(
    tensor: Tensor,
    row: Tensor,
    *,
    mask: Tensor | None = None,
    counts: Tensor | None = None,
    descriptor: HistogramDescriptor | None = None,
    quantization: Tensor | None = None,
    target: TargetFormat | None = None,
    accumulate: bool = False,
) -> None:
    """Reduce a tensor in one pass into buffers of the caller, without waiting for a device.

    Args:
        tensor: any shape, strides and device; floating, integer or bool.
        row: contiguous int64 ``[18]`` on the tensor's device, laid out as in ``telemetry.summary.fields``.
        mask: shape and device of ``tensor``; bool, False elements do not count, or integer, how often each one counts.
        counts: contiguous int64 ``[descriptor.num_counts]``, added to; needs ``descriptor``.
        quantization: contiguous int64 ``[4]``, treated as ``row`` is; needs ``target``.
        accumulate: merge into what ``row`` and ``quantization`` hold, as the later one, instead of overwriting it.

    Raises:
        DtypeUnsupportedError: the tensor is complex or quantized.
    """
    code = dtype_code(tensor.dtype)
    build = _build.get()
    has_boolean_mask = mask is None or (mask.is_cpu and mask.dtype is torch.bool)
    # Buffers on another device go to ATen, whose error names both devices.
    if build is None or not _has_plain_memory(tensor) or not row.is_cpu or not has_boolean_mask:
        _reduce_with_aten(tensor, row, mask, counts, descriptor, quantization, target, accumulate)
        return
    address = tensor.data_ptr()
    if mask is not None or not _lies_dense(tensor, address, code):
        tensor, mask = _dense(tensor, mask)
        address = tensor.data_ptr()
    _kernel.reduce(
        build,
        code,
        address,
        tensor.numel(),
        0 if mask is None else mask.data_ptr(),
        row.data_ptr(),
        accumulate,
        0 if counts is None else counts.data_ptr(),
        *(_NO_GRID if descriptor is None else _grid(descriptor)),
        0 if quantization is None else quantization.data_ptr(),
        *(_NO_TARGET if target is None else (target.mantissa_bits, target.min_exponent, target.max_finite)),
    )


def kernel_fingerprint(tensor: Tensor) -> int | None:
    """Return the hash that ``telemetry.fingerprint`` defines, or None where the kernel does not serve the tensor.

    Unlike a summary it depends on the order of elements, so only a contiguous tensor is read as it lies.
    """
    if _build.get() is None or not _has_plain_memory(tensor) or not tensor.is_contiguous() or tensor.is_neg():
        return None
    address, item_size = tensor.data_ptr(), tensor.element_size()
    if address % item_size or item_size > 8:
        return None
    return _kernel.fingerprint(item_size, address, tensor.numel())


def _grid(descriptor: HistogramDescriptor) -> tuple[int, int, int]:
    return descriptor.bins_per_octave, descriptor.lo_exp, descriptor.hi_exp


def _reduce_with_aten(
    tensor: Tensor,
    row: Tensor,
    mask: Tensor | None,
    counts: Tensor | None,
    descriptor: HistogramDescriptor | None,
    quantization: Tensor | None,
    target: TargetFormat | None,
    accumulate: bool,
) -> None:
    with torch.no_grad():
        fresh = torch.empty_like(row) if accumulate else row
        aten.reduce_row(tensor, fresh, mask)
        if accumulate:
            aten.accumulate_row(row, fresh)
        if counts is not None and descriptor is not None:
            aten.count_bins_(tensor, counts, descriptor, mask)
        if quantization is not None and target is not None:
            if not accumulate:
                quantization.zero_()
            aten.add_quantization_(tensor, quantization, target, mask)


def reduce_many_into(
    tensors: Sequence[Tensor],
    rows: Tensor,
    *,
    counts: Tensor | None = None,
    counts_index: Sequence[int] | None = None,
    descriptor: HistogramDescriptor | None = None,
    accumulate: bool = False,
) -> None:
    """Reduce tensor i into row i, on CPU in one call of the kernel for all.

    Args:
        tensors: as in :func:`reduce_into`, all on the device of ``rows``.
        rows: contiguous int64 ``[len(tensors), 18]``.
        counts: contiguous int64 ``[m, descriptor.num_counts]``, added to; needs ``descriptor``.
        counts_index: for each tensor its row of ``counts``, or -1 to count no histogram; left out, row i.
        accumulate: as in :func:`reduce_into`.

    Raises:
        DtypeUnsupportedError: a tensor is complex or quantized; nothing has been written then.
    """
    codes = [dtype_code(tensor.dtype) for tensor in tensors]
    index = list(range(len(tensors)) if counts_index is None else counts_index)
    assert rows.shape == (len(tensors), ROW_WORDS)
    build = _build.get()
    if build is None or not rows.is_cpu or not all(map(_has_plain_memory, tensors)):
        for tensor, row, i in zip(tensors, rows.unbind(), index, strict=True):
            wanted = counts[i] if counts is not None and i >= 0 else None
            reduce_into(tensor, row, counts=wanted, descriptor=descriptor, accumulate=accumulate)
        return
    addresses = [tensor.data_ptr() for tensor in tensors]
    # Copies of what had gaps; they must live until the kernel is done.
    copies = []
    for i, (tensor, code) in enumerate(zip(tensors, codes, strict=True)):
        if not _lies_dense(tensor, addresses[i], code):
            copies.append(_dense(tensor, None)[0])
            addresses[i] = copies[-1].data_ptr()
    _kernel.reduce_many(
        build,
        rows.data_ptr(),
        accumulate,
        0 if counts is None else counts.data_ptr(),
        *(_NO_GRID if descriptor is None else _grid(descriptor)),
        codes,
        addresses,
        [tensor.numel() for tensor in tensors],
        index,
    )
