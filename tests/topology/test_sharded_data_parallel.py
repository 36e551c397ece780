"""FSDP2, HSDP and FSDP2 with tensor parallelism give the record that DDP gives for the same seed and batch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import telemetry
from tests.aggregators import GatheringAggregator
from tests.ranks import run_ranks
from tests.topology.comparing import assert_same_record, describe

WEIGHTS = ("parameters", "gradients", "updates")


class Net(nn.Module):
    """Sizes that no number of ranks divides, one parameter above the update sample, one with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 702)
        self.down = nn.Linear(702, 7)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))) * self.scale.sum()


def make(kind: str, world_size: int) -> nn.Module:
    torch.manual_seed(0)
    model = Net().double()
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp":
        fully_shard(model.up)
        return fully_shard(model)
    if kind == "hsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])


def record(rank: int, world_size: int, kind: str) -> dict:
    model = make(kind, world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    kept = GatheringAggregator()
    torch.manual_seed(1)
    data = torch.randn(2, 8, 6, dtype=torch.float64)
    data_ranks, data_rank = (2, rank // 2) if kind == "fsdp_tp" else (world_size, rank)
    with telemetry.watch(model, to=kept, optimizer=optimizer, signals=WEIGHTS, every=1, hist_every=1) as session:
        for step in (1, 2):
            with session.step(step):
                part = data[step - 1].chunk(data_ranks)[data_rank]
                optimizer.zero_grad()
                model(part).square().mean().backward()
                optimizer.step()
    if rank:
        return {}
    assert not kept.packets[-1].findings
    return {
        (step, kind, name): describe(kept.summary(kind, name, step))
        for step in (1, 2)
        for kind, name in kept.rows(step)
    }


@pytest.mark.parametrize(("kind", "world_size"), [("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("fsdp_tp", 4)])
def test_the_record_equals_that_of_ddp(kind, world_size):
    reference = run_ranks(record, 2 if kind == "fsdp_tp" else world_size, "ddp")[0]
    found = run_ranks(record, world_size, kind)[0]
    assert len(reference) == 2 * 3 * 5
    assert_same_record(found, reference, rel=1e-9)


def count_elements(rank: int, world_size: int) -> list[int]:
    kept = GatheringAggregator()
    model = fully_shard(nn.Linear(4, 1, bias=False))
    with telemetry.watch(model, to=kept, signals=("parameters",), every=1) as session, session.step(1):
        pass
    local = sum(p.to_local().numel() for p in model.parameters())
    return [kept.summary("parameter", "weight", 1).total, local, dist.get_world_size()]


def test_an_empty_shard_joins_and_adds_nothing():
    assert [row[:2] for row in run_ranks(count_elements, 2)] == [[4, 4], [4, 0]]
