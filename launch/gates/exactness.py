"""The job of the exactness gates: train observed, gather beside it, compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

import telemetry
from launch.gates.comparison import compare_record
from launch.gates.gathered import GatheredReference, Join
from launch.gates.model import loss_of, make_tokens

__all__ = ["train_and_compare"]

_STEPS: Final = 3
_MICRO_BATCHES: Final = 2


def train_and_compare(
    model: nn.Module,
    device: torch.device,
    to: Path,
    *,
    called: nn.Module | None = None,
    data_rank: int | None = None,
    length: int = 8,
    joins: Mapping[str, Join] | None = None,
    reduce_gradients: Callable[[], None] = lambda: None,
    **options: Any,
) -> dict[str, object]:
    """Train a few steps with every signal recorded at every step, and compare the record with the gathered tensors.

    Every rank calls this. Ranks have batches of different sizes, so that a wrong weighting shows.

    Args:
        model: whose modules are hooked; ``called``: its wrapper, if it has one.
        to: directory of the record.
        data_rank: decides the batches, the rank itself if None; length: of the sequences.
        joins: see :class:`GatheredReference`.
        reduce_gradients: called when the gradients of all micro-batches are there.
        options: for ``telemetry.watch``.

    Returns:
        The quantities of ``EXACTNESS`` on rank zero, nothing elsewhere.
    """
    called = model if called is None else called
    data_rank = dist.get_rank() if data_rank is None else data_rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    reference = GatheredReference(model, joins)
    options = {"every": 1, "hist_every": 1, "full_updates": True, **options}
    with telemetry.watch(called, optimizer=optimizer, to=to, **options) as session:
        for step in range(1, _STEPS + 1):
            reference.begin_step()
            with session.step(step):
                optimizer.zero_grad()
                for part in range(_MICRO_BATCHES):
                    batch = make_tokens(_MICRO_BATCHES * step + part, data_rank, 2 + data_rank % 3, length)
                    loss_of(called, batch, device).backward()
                reduce_gradients()
                reference.before_update()
                optimizer.step()
            reference.end_step(step)
    return compare_record(to, reference.summaries) if dist.get_rank() == 0 else {}
