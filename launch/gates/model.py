"""The model that gates train: a decoder small enough for a laptop, with every kind of site that a real one has."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

__all__ = ["VOCABULARY", "Attention", "Block", "SmallDecoder", "loss_of", "make_tokens"]

VOCABULARY = 48


class Attention(nn.Module):
    """Causal self-attention; as many heads as its projections have width for, so that it may be split over ranks."""

    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, time, width]`` to the same shape."""
        query, key, value = (self._heads(part(x)) for part in (self.query, self.key, self.value))
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.mix(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class Block(nn.Module):
    """Attention and a two-layer MLP, each behind a norm and added to the residual stream."""

    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, head_width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up, self.act, self.down = nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, time, width]`` to the same shape."""
        x = x + self.attention(self.norm_attention(x))
        return x + self.down(self.act(self.up(self.norm_mlp(x))))


class SmallDecoder(nn.Module):
    """Embedding, blocks, norm and head; float32, the same weights on every rank."""

    def __init__(
        self, num_blocks: int = 2, num_heads: int = 4, *, head_width: int = 4, has_scale: bool = False
    ) -> None:
        """Make the weights.

        Args:
            num_blocks, num_heads, head_width: sizes.
            has_scale: whether the logits have a factor of one element, which no two ranks can share out.
        """
        super().__init__()
        torch.manual_seed(0)
        width = num_heads * head_width
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, head_width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.scale = nn.Parameter(torch.ones(1)) if has_scale else None

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 ``[batch, time]`` to logits ``[batch, time, VOCABULARY]``."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if self.scale is None else logits * self.scale


def make_tokens(step: int, rank: int, num_sequences: int, length: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, int64 ``[num_sequences, length]``, the same for the same step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(VOCABULARY, (num_sequences, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor], device: torch.device) -> Tensor:
    """Return the mean cross entropy of a batch from :func:`make_tokens`."""
    inputs, targets = (part.to(device) for part in batch)
    loss: Tensor = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    return loss
