"""What the tests of both callbacks have in common: data, and the record as they ask for it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from aggregator import open_history
from telemetry.summary import summarize

BATCH, ACCUMULATION, MAX_STEPS, INTERVAL = 4, 2, 8, 3
WIDTH = 4


class Net(nn.Module):
    """Two layers, small enough that a step costs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x))).squeeze(-1)


def launched(rank, world_size) -> dict[str, str]:
    """Return what torchrun tells a process; the process group is there already."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def inputs_and_targets(count):
    """Return the same numbers on every rank and in every run."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, WIDTH, generator=generator), torch.randn(count, generator=generator)


def record(path) -> dict[tuple[int, str, str], dict[str, Any]]:
    """Return (step, kind, site) → row."""
    return {(row["step"], row["kind"], row["site"]): row for row in open_history(path).observations().to_pylist()}


def assert_gradients_are(rows, seen) -> None:
    """Compare the record with step → name → gradient, as the framework had them when the optimizer stepped."""
    steps = {step for step, kind, _ in rows if kind == "gradient"}
    assert steps
    for step in steps:
        for name, gradient in seen[step].items():
            row, expected = rows[step, "gradient", name], summarize(gradient)
            assert (row["total"], row["calls"]) == (gradient.numel(), 1)
            assert (row["sum"], row["sum_sq"], row["absmax"]) == (expected.sum, expected.sum_sq, expected.absmax)


def gradient_norm(rows, step):
    """Return the norm over all gradients of a step."""
    return math.sqrt(sum(row["sum_sq"] for (s, kind, _), row in rows.items() if (s, kind) == (step, "gradient")))
