"""How many tokens go to each expert, counted from the routing table without leaving the device."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["count_experts"]


def count_experts(
    routes: Tensor, num_experts: int, *, multiplicity: Tensor | None = None, padding: Tensor | None = None
) -> Tensor:
    """Count the tokens of each expert.

    Args:
        routes: integer ``[tokens, k]``, the experts of each token; a negative entry routes nowhere.
        num_experts: size of the result; entries at or above it count nowhere.
        multiplicity: int64 ``[tokens]``, how often each token counts; once where it is left out.
        padding: bool ``[tokens]``, True for tokens that do not count.

    Returns:
        int64 ``[num_experts]`` on the device of ``routes``. Nothing is read back and no size depends on the data.

    Example:
        >>> count_experts(torch.tensor([[0, 2], [1, -1]]), 3).tolist()
        [1, 1, 1]
    """
    weight = torch.ones(len(routes), dtype=torch.int64, device=routes.device)
    if multiplicity is not None:
        weight = weight * multiplicity.to(torch.int64)
    if padding is not None:
        weight = weight * ~padding
    # What routes nowhere is counted in one more bin, which is then cut off.
    nowhere = (routes < 0) | (routes >= num_experts)
    bins = torch.where(nowhere, num_experts, routes).to(torch.int64)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=routes.device)
    counts.scatter_add_(0, bins.reshape(-1), weight[:, None].expand_as(bins).reshape(-1))
    return counts[:num_experts]
