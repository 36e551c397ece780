"""A small data-parallel training job for tests, watched through the real merge into a real run directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import telemetry
from aggregator import open_history
from aggregator.sinks import JsonlSink
from telemetry.summary import FLOAT_FIELDS, INT_FIELDS

GLOBAL_BATCH, STEPS = 8, 4
DEADLINES = telemetry.Deadlines(attach_s=30, merge_s=30, close_s=30)


class Net(nn.Module):
    """Batch norm buffers, dropout's random numbers, a tied weight; sizes that make every site small."""

    def __init__(self, *, random: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 6)
        self.norm = nn.BatchNorm1d(6) if random else nn.LayerNorm(6)
        self.body = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.2 if random else 0.0), nn.Linear(12, 6))
        self.head = nn.Linear(6, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.norm(self.embed(tokens))))


def train(
    rank: int,
    world_size: int,
    to: Path | str | None,
    *,
    random: bool = False,
    on_step: Callable[[telemetry.Session], None] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train ``STEPS`` steps of a fixed global batch split over the ranks; watch where ``to`` is given.

    ``on_step`` is called after each step of a watched training.
    """
    torch.manual_seed(0)
    model: nn.Module = Net(random=random).double()
    # A world of one has no gradients to reduce, and so needs no wrapper.
    parallel = DistributedDataParallel(model) if world_size > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + rank)
    session = None
    if to is not None:
        options = {"every": 1, "hist_every": 2, "deadlines": DEADLINES, **options}
        session = telemetry.watch(parallel, to=to, optimizer=optimizer, **options)
    losses = []
    for step in range(1, STEPS + 1):
        with session.step(step) if session else torch.enable_grad():
            tokens = (torch.arange(GLOBAL_BATCH) * 5 + step) % 16
            mine = tokens.chunk(world_size)[rank]
            loss = nn.functional.cross_entropy(parallel(mine), (mine + 1) % 16)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if session and on_step:
            on_step(session)
    report = None
    if session:
        session.close()
        report = session.report
    return {
        "losses": losses,
        "state": {name: value.numpy().copy() for name, value in model.state_dict().items()},
        "rng": torch.get_rng_state().numpy().tobytes(),
        "report": report,
    }


def train_and_read(rank: int, world_size: int, to: Path, sinks: bool = False) -> dict[str, Any]:
    """Train watched, then read the record where rank zero wrote it."""
    result = train(rank, world_size, to, sinks=[JsonlSink(to / "record.jsonl")] if sinks else ())
    dist.barrier()
    return {"report": result["report"], "record": read(to) if rank == 0 else None}


def read(to: Path) -> dict[tuple[int, str, str], dict[str, Any]]:
    """Return (step, kind, site) → fields and histogram counts of every observed row."""
    history = open_history(to)
    rows = history.observations().to_pylist()
    found = {}
    for row in rows:
        key = (row["step"], row["kind"], row["site"])
        fields = {name: row[name] for name in (*INT_FIELDS, *FLOAT_FIELDS)}
        bins = dict(zip(row["hist_bins"] or (), row["hist_counts"] or (), strict=True))
        found[key] = {"presence": row["presence"], "bins": bins, **fields}
    return found
