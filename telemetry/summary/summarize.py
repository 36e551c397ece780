"""From one tensor to one summary, for whoever wants the numbers at once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from telemetry.errors import DtypeUnsupportedError, MaskShapeError
from telemetry.summary import aten
from telemetry.summary.fields import NUM_INTS, ROW_WORDS
from telemetry.summary.histogram import DEFAULT_DESCRIPTOR, Histogram, HistogramDescriptor
from telemetry.summary.record import TensorSummary

__all__ = ["summarize"]


def _fitting_mask(tensor: Tensor, mask: Tensor) -> Tensor:
    if mask.dtype is not torch.bool:
        raise DtypeUnsupportedError(
            f"the mask is {mask.dtype}, torch.bool is accepted",
            remedy="compare it first, for example mask != 0",
        )
    fits = mask.dim() == tensor.dim() and all(m in (1, t) for m, t in zip(mask.shape, tensor.shape, strict=True))
    if not fits:
        raise MaskShapeError(
            f"the mask has shape {list(mask.shape)}, the tensor {list(tensor.shape)}",
            remedy="give the mask every dimension of the tensor, of its size or of size 1 (mask[..., None])",
        )
    return mask.expand(tensor.shape)


def summarize(
    tensor: Tensor, *, mask: Tensor | None = None, histogram: HistogramDescriptor | bool | None = None
) -> TensorSummary:
    """Reduce a tensor to its summary.

    Reads the result back, so on an accelerator the host waits; a session does not do this, it stages.

    Args:
        tensor: any shape, strides and device; floating, integer or bool. Only this process's elements are seen.
        mask: bool with as many dimensions as ``tensor``, each of its size or 1; False elements (padding) do not count.
        histogram: a grid, or True for the default one; None or False counts none.

    Returns:
        The summary of one call.

    Raises:
        DtypeUnsupportedError: the tensor is complex, or the mask is not bool.
        MaskShapeError: the mask does not fit.
    """
    valid = None if mask is None else _fitting_mask(tensor, mask)
    with torch.no_grad():
        row = torch.empty(ROW_WORDS, dtype=torch.int64, device=tensor.device)
        aten.reduce_row(tensor, row, valid)
        counted = _histogram(tensor, valid, histogram)
    words = row.cpu().numpy()
    return TensorSummary(words[:NUM_INTS], words.view(np.float64)[NUM_INTS:], counted, aten.REDUCTION_DTYPE)


def _histogram(tensor: Tensor, valid: Tensor | None, wanted: HistogramDescriptor | bool | None) -> Histogram | None:
    if wanted is None or wanted is False:
        return None
    descriptor = DEFAULT_DESCRIPTOR if wanted is True else wanted
    counts = torch.zeros(descriptor.num_counts, dtype=torch.int64, device=tensor.device)
    aten.count_bins_(tensor, counts, descriptor, valid)
    return Histogram(descriptor, counts.cpu().numpy())
