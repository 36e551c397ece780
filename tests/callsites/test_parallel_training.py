"""Ranks with call sites, checkpoints, accumulation and compiled blocks train the same bits with and without us."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import telemetry
from tests.aggregators import GatheringAggregator
from tests.ranks import run_ranks

WAYS = ["ddp", "ddp compiled", "fsdp", "fsdp compiled blocks"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.linear(x))
        telemetry.observe_tensor(self, "hidden", "hidden_state", y, batch_dim=0)
        return self.norm(x + self.dropout(y))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.counter: Tensor
        self.register_buffer("counter", torch.zeros(()))
        self.checkpointed = True

    def forward(self, x: Tensor) -> Tensor:
        self.counter += 1
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def build(way: str) -> tuple[nn.Module, nn.Module]:
    """Return the model and what the loop calls."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Net()
    if way == "ddp":
        return model, nn.parallel.DistributedDataParallel(model)
    if way == "ddp compiled":
        model.checkpointed = False
        return model, nn.parallel.DistributedDataParallel(torch.compile(model, backend="aot_eager", fullgraph=True))
    if "compiled" in way:
        model.checkpointed = False
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, backend="aot_eager", fullgraph=True)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, model


def local(tensor: Any) -> Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().clone()


def train(rank: int, way: str, kept: GatheringAggregator | None):
    torch._dynamo.reset()
    torch._dynamo.config.optimize_ddp = False
    model, call = build(way)
    torch.manual_seed(10 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = None
    if kept is not None:
        options = {"call_sites": ("hidden_state",), "every": 2, "hist_every": 2}
        session = telemetry.watch(call, to=kept, optimizer=optimizer, **options)
    losses = []
    for step in range(1, 5):
        with session.step(step) if session else torch.enable_grad():
            for _ in range(2):
                loss = call(torch.randn(4 + rank, 8)).square().mean()
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    if session:
        session.close()
    state = [local(p) for p in model.parameters()] + [local(b) for b in model.buffers()]
    return losses, state, torch.get_rng_state()


def with_and_without(rank: int, world_size: int) -> dict[str, Any]:
    found = {}
    for way in WAYS:
        plain = train(rank, way, None)
        kept = GatheringAggregator()
        watched = train(rank, way, kept)
        same = plain[0] == watched[0] and torch.equal(plain[2], watched[2])
        same = same and all(torch.equal(a, b) for a, b in zip(plain[1], watched[1], strict=True))
        sites = [
            ("hidden_state", "blocks.1.hidden"),
            ("activation", "blocks.1.linear"),
            ("activation_grad", "blocks.1.linear"),
        ]
        rows = {kind: kept.summary(kind, name, 4) for kind, name in sites}
        found[way] = (same, {kind: (row.calls, row.total) for kind, row in rows.items()})
    return found


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    return run_ranks(with_and_without, 2, deadline_s=110)


@pytest.mark.parametrize("way", WAYS)
def test_losses_parameters_buffers_and_random_numbers_are_the_same_bit_for_bit(trained, way):
    assert [found[way][0] for found in trained] == [True, True]


@pytest.mark.parametrize("way", WAYS)
def test_each_rank_and_micro_batch_counts_once(trained, way):
    # Two micro-batches on two ranks, of 4 and of 5 rows of 8.
    expected = dict.fromkeys(("hidden_state", "activation", "activation_grad"), (4, 2 * (4 + 5) * 8))
    assert [found[way][1] for found in trained] == [expected, expected]
