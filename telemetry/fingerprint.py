"""An order-sensitive hash of a tensor's bits, by which replicas are compared without being sent.

The hash is Σ mix(bits_i) · (2i + 1) over 64-bit integers that wrap. The mix is a bijection and the weights are odd, so
two tensors that differ in exactly one element always differ in the hash, whatever the element; exchanged elements
change it as well. It is integer arithmetic only, so every device and block size gives the same value.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from telemetry.summary.backend import kernel_fingerprint

__all__ = ["combine_", "fingerprint"]

_BLOCK: Final = 1 << 16
_MULTIPLIER: Final = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64, the golden ratio's odd 64-bit multiple
_CALL_MULTIPLIER: Final = -4132994306676758123  # 0xC6A4A7935BD1E995, keeps the order of several calls
_INT_OF_SIZE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: Tensor) -> Tensor:
    """Return the hash of all elements in row-major order.

    Args:
        tensor: plain, of any dtype up to 8 bytes an element.

    Returns:
        int64 scalar tensor on the tensor's device; nothing is read back.
    """
    if (hashed := kernel_fingerprint(tensor)) is not None:
        return torch.tensor(hashed, dtype=torch.int64)
    flat = tensor.detach().resolve_neg().reshape(-1)
    bits = flat.view(_INT_OF_SIZE[flat.element_size()])
    result = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weights = torch.arange(1, 2 * min(_BLOCK, max(len(bits), 1)), 2, device=tensor.device)
    for start in range(0, len(bits), _BLOCK):
        # Out of place: a 64-bit block is the tensor's own memory.
        mixed = bits[start : start + _BLOCK].to(torch.int64) * _MULTIPLIER
        mixed ^= mixed >> 32
        result += (mixed * weights[: len(mixed)]).sum() + 2 * start * mixed.sum()
    return result


def combine_(earlier: Tensor, later: Tensor) -> None:
    """Fold the hash of a later call of the same site into ``earlier``, in place; the order of calls matters."""
    earlier.mul_(_CALL_MULTIPLIER).add_(later)
