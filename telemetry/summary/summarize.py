"""From one tensor to one summary, for whoever wants the numbers at once."""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import Tensor

from telemetry.errors import DtypeUnsupportedError, MaskShapeError
from telemetry.summary.backend import reduce_into
from telemetry.summary.dtypes import REDUCTION_DTYPE
from telemetry.summary.fields import FINITE, NUM_INTS, ROW_WORDS
from telemetry.summary.histogram import DEFAULT_DESCRIPTOR, Histogram, HistogramDescriptor
from telemetry.summary.quantization import QUANTIZATION_WORDS, QuantizationLoss, TargetFormat, target_format
from telemetry.summary.record import TensorSummary

__all__ = ["descriptor_of", "fitting_weight", "local_part", "summarize", "summary_of"]


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's shard of a DTensor, and any other tensor as it is."""
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return tensor
    # Importing it takes seconds, and without it there is no DTensor to unwrap.
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(tensor, module.DTensor):
        return tensor
    local: Tensor = tensor.to_local()
    return local


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def fitting_weight(tensor: Tensor, mask: Tensor | None, weights: Tensor | None) -> Tensor | None:
    """Return what each element counts for, expanded to the tensor's shape; None where each counts once.

    Raises:
        DtypeUnsupportedError: the mask is not bool, or the weights are not integers.
        MaskShapeError: one does not fit the tensor, or both were given.
    """
    if mask is not None and weights is not None:
        raise MaskShapeError(
            "both a mask and weights were given", remedy="give weights alone, with 0 where the mask is False"
        )
    if mask is not None and mask.dtype is not torch.bool:
        raise DtypeUnsupportedError(
            f"the mask is {mask.dtype}, torch.bool is accepted",
            remedy="compare it first, for example mask != 0",
        )
    if weights is not None and not _is_integer(weights.dtype):
        raise DtypeUnsupportedError(
            f"the weights are {weights.dtype}, integer dtypes are accepted",
            remedy="a weight says how often an element counts; give multiplicities, or a mask of torch.bool",
        )
    weight = mask if weights is None else weights
    if weight is None:
        return None
    weight = local_part(weight)
    fits = weight.dim() == tensor.dim() and all(w in (1, t) for w, t in zip(weight.shape, tensor.shape, strict=True))
    if not fits:
        raise MaskShapeError(
            f"the {'mask has' if weights is None else 'weights have'} shape {list(weight.shape)}, "
            f"the tensor {list(tensor.shape)}",
            remedy="give it every dimension of the tensor, of its size or of size 1 (mask[..., None])",
        )
    return weight.expand(tensor.shape)


def descriptor_of(histogram: HistogramDescriptor | bool | None) -> HistogramDescriptor | None:
    """Return the grid that an argument ``histogram`` asks for, or None."""
    if histogram is None or histogram is False:
        return None
    return DEFAULT_DESCRIPTOR if histogram is True else histogram


def summarize(
    tensor: Tensor,
    *,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
    histogram: HistogramDescriptor | bool | None = None,
    target: str | torch.dtype | None = None,
) -> TensorSummary:
    """Reduce a tensor to its summary.

    Reads the result back, so on an accelerator the host waits once, at the end; a session does not, it stages.

    Args:
        tensor: any shape, strides and device; floating, integer or bool. Of a DTensor only the local shard is seen.
        mask: bool with as many dimensions as ``tensor``, each of its size or 1; False elements (padding) do not count.
        weights: integers >= 0, shaped like a mask: how often each element counts, exactly as if it were repeated.
            Instead of a mask. They are not read back to be checked, so a negative one gives a summary of nothing real.
        histogram: a grid, or True for the default one; None or False counts none.
        target: also measure what a cast to this format would lose: ``float8_e4m3fn``, ``float8_e5m2``, ``bfloat16`` or
            ``float16``, by name or as the torch dtype. The result has it as ``quantization``.

    Returns:
        The summary of one call.

    Raises:
        DtypeUnsupportedError: the tensor is complex or quantized, the mask is not bool, the weights are not integers,
            or ``target`` is no such format.
        MaskShapeError: the mask or the weights do not fit.

    Example:
        >>> import torch
        >>> from telemetry.summary import summarize
        >>> padded = torch.tensor([[1.0, 2.0], [6.0, 0.0]])
        >>> summarize(padded, mask=torch.tensor([[True, True], [True, False]])).mean
        3.0
        >>> summarize(torch.tensor([1e-5, 500.0]), target="float8_e4m3fn").quantization.overflow
        1
    """
    local = local_part(tensor)
    weight = fitting_weight(local, mask, weights)
    descriptor = descriptor_of(histogram)
    form = None if target is None else target_format(target)
    row = torch.empty(ROW_WORDS, dtype=torch.int64, device=local.device)
    counts = None if descriptor is None else torch.zeros(descriptor.num_counts, dtype=torch.int64, device=local.device)
    lost = None if form is None else torch.empty(QUANTIZATION_WORDS, dtype=torch.int64, device=local.device)
    reduce_into(local, row, mask=weight, counts=counts, descriptor=descriptor, quantization=lost, target=form)
    return summary_of(row, counts, descriptor, lost, form)


def summary_of(
    row: Tensor,
    counts: Tensor | None,
    descriptor: HistogramDescriptor | None,
    lost: Tensor | None,
    target: TargetFormat | None,
) -> TensorSummary:
    """Read packed records back from their device and wrap them; the buffers may be reused afterwards."""
    words = row.cpu().numpy().copy()
    histogram = None
    if counts is not None and descriptor is not None:
        histogram = Histogram(descriptor, counts.cpu().numpy().copy())
    quantization = None
    if lost is not None and target is not None:
        quantization = QuantizationLoss.from_packed(target, int(words[FINITE]), lost.cpu().numpy())
    return TensorSummary(words[:NUM_INTS], words.view(np.float64)[NUM_INTS:], histogram, REDUCTION_DTYPE, quantization)
