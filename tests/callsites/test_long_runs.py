"""Hundreds of steps, evaluations and growing models: flat memory, and rows that say what they are."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import telemetry
from telemetry.presence import Presence
from tests.aggregators import KeepingAggregator


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.block, x, use_reentrant=False)
        telemetry.observe_tensor(self, "output", "output_logits", y)
        return y


class DroppingAggregator(KeepingAggregator):
    """Keeps the newest packet only."""

    def submit(self, packet) -> None:
        self.packets = [packet]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def num_tensors() -> int:
    gc.collect()
    # By type, because asking a proxy what it is an instance of touches whatever it stands for.
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_three_hundred_due_steps_leave_neither_memory_nor_tensors_behind():
    model, kept = Net(), DroppingAggregator()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    options = {"call_sites": ("output_logits",), "select": ("block", "block.2.*"), "every": 1, "hist_every": 50}
    tensors, resident = [], []
    with telemetry.watch(model, to=kept, optimizer=optimizer, **options) as session:
        for step in range(1, 301):
            with session.step(step):
                for _ in range(2):
                    model(torch.randn(4, 32)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if step % 50 == 0:
                tensors.append(num_tensors())
                resident.append(resident_bytes())
    assert max(tensors[2:]) <= tensors[1]
    assert resident[-1] - resident[1] < 8 << 20


def test_a_hundred_evaluations_without_gradients_in_train_mode_keep_flat_memory_and_rows_say_the_mode():
    model, kept = Net(), DroppingAggregator()
    modes, tensors = [], []
    with telemetry.watch(model, to=kept, signals=("activations", "activation_grads"), every=1) as session:
        for step in range(1, 101):
            model.train(step <= 50)
            with session.step(step), torch.no_grad():
                model(torch.randn(4, 32))
            modes.append(kept.packets[-1].facts.mode)
            if step % 25 == 0:
                tensors.append(num_tensors())
    assert modes == ["train"] * 50 + ["eval"] * 50
    assert max(tensors) <= tensors[0]
    assert not any(kind == "activation_grad" for kind, _ in kept.sites())


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 4, sparse=True)
        self.head = nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.embedding(tokens))}


def test_a_sparse_embedding_a_dict_output_and_a_module_unfrozen_later_are_each_told_as_they_are():
    model, kept = Tokens(), KeepingAggregator()
    model.head.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with telemetry.watch(model, to=kept, optimizer=optimizer, every=1) as session:
        for step in range(1, 7):
            if step == 5:
                model.head.requires_grad_(True)
            with session.step(step):
                model(torch.tensor([1, 2, 7]))["logits"].sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert kept.sites()["gradient", "embedding.weight"].numel == 4000
    logical, stored = (kept.summary(kind, "embedding.weight", 1) for kind in ("gradient", "gradient_stored"))
    assert (logical.total, stored.total) == (4000, 12)
    assert kept.presence("gradient", "head.weight", 4) == (Presence.SITE_ABSENT, "requires_grad is False")
    assert kept.summary("gradient", "head.weight", 5).total == 8
    assert kept.summary("update", "head.weight", 5).absmax > 0
