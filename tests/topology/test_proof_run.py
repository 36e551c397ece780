"""The proof: a model split over every axis at once gives the record of the whole model in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import telemetry
from aggregator.checks import check_step
from telemetry import ParallelLayout, Partial, Presence, Replica, Shard
from tests.aggregators import GatheringAggregator, KeepingAggregator
from tests.ranks import run_ranks
from tests.topology.comparing import assert_same_record, describe
from tests.topology.parallel_model import VOCABULARY, Axes, Stage, forward_backward, global_name, reduce_gradients

PLACEMENTS = {
    # Sequence parallelism splits what lies between the MLPs, column parallelism what lies inside of them.
    ("activation", "*"): {"tp": Shard(0)},
    ("activation_grad", "*"): {"tp": Shard(0)},
    ("activation", "*.gathered"): {"tp": Replica()},
    ("activation_grad", "*.gathered"): {"tp": Partial("sum")},
    ("activation", "*.up"): {"tp": Shard(1)},
    ("activation_grad", "*.up"): {"tp": Shard(1)},
    # down's outputs are partial sums, but every rank of tp gets the gradient of their sum.
    ("activation", "*.down"): {"tp": Partial("sum")},
    ("activation_grad", "*.down"): {"tp": Replica()},
    "embed.weight": {"pp": Replica()},
}
STEPS = (1, 2)


def run(rank: int, sizes: dict[str, int], kept: KeepingAggregator, fault: int | None = None) -> KeepingAggregator:
    axes = Axes.make(sizes, rank)
    stage = axes.at.get("pp", 0)
    model = Stage(axes, stage, axes.sizes.get("pp", 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(3)
    data_parts = sizes.get("dp", 1)
    tokens = torch.randint(VOCABULARY, (len(STEPS), 2, 16))
    placements = {key: where for key, where in PLACEMENTS.items() if set(where) <= set(sizes)}
    with telemetry.watch(
        model,
        to=kept,
        optimizer=optimizer,
        every=1,
        hist_every=1,
        layout=ParallelLayout.from_sizes(sizes),
        placements=placements,
        site_names=global_name(stage),
    ) as session:
        for step in STEPS:
            with session.step(step):
                optimizer.zero_grad()
                for part in tokens[step - 1].chunk(data_parts)[axes.at.get("dp", 0)]:
                    forward_backward(model, axes, part)
                reduce_gradients(model, axes)
                optimizer.step()
            if rank == fault:
                next(model.layers[0].norm.parameters()).detach().view(torch.int64)[2] ^= 1
    return kept


def split_record(rank: int, world_size: int, sizes: dict[str, int], fault: int | None = None):
    kept = run(rank, sizes, GatheringAggregator(), fault)
    findings = [dict(f) for packet in kept.packets for f in check_step(packet, kept.sites().values())]
    return record_of(kept), findings


def record_of(kept: KeepingAggregator) -> dict:
    return {
        (step, kind, name): describe(kept.summary(kind, name, step))
        for step in STEPS
        for kind, name in kept.rows(step)
        if kept.presence(kind, name, step)[0] is Presence.OBSERVED
    }


@pytest.fixture(scope="module")
def reference() -> dict:
    """The record of the whole model in one process, without what a split model can only hold in part."""
    whole = record_of(run(0, {}, KeepingAggregator()))
    assert len(whole) == 2 * (2 * (4 * 5 + 2) + 3 * (4 * 5 + 1))
    return {key: row for key, row in whole.items() if not is_partial(*key[1:])}


def is_partial(kind: str, name: str) -> bool:
    return (kind, name.rpartition(".")[2]) in {("activation", "down"), ("activation_grad", "gathered")}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("sizes", [{"pp": 2, "cp": 2, "tp": 2}, {"pp": 2, "dp": 2, "tp": 2}, {"tp": 4}, {"cp": 4}])
def test_the_split_model_gives_the_record_of_the_whole_one(sizes, reference):
    world_size = ParallelLayout.from_sizes(sizes).world_size
    found, findings = run_ranks(split_record, world_size, sizes, deadline_s=200)[0]
    if "tp" not in sizes:
        found = {key: row for key, row in found.items() if not is_partial(*key[1:])}
    assert_same_record(found, reference, rel=1e-9)
    assert findings == []


@pytest.mark.timeout(240)
def test_one_flipped_bit_on_one_rank_is_named_by_site_axis_and_rank_and_nothing_else_is():
    sizes, fault = {"pp": 2, "cp": 2, "tp": 2}, 6
    _, findings = run_ranks(split_record, 8, sizes, fault, deadline_s=200)[0]
    assert {(f["code"], f["step"], f["site"], tuple(f["axes"]), tuple(f["ranks"])) for f in findings} <= {
        ("replica_disagreement", 2, "layers.2.norm.weight", ("cp", "tp"), (6,)),
    }
    assert findings[0]["kind"] == "parameter"


class Experts(nn.Module):
    """The experts of one rank; tokens have been sent to them already."""

    def __init__(self, first: int, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        weights = torch.randn(4, 3, 3, dtype=torch.float64)
        self.experts = nn.ModuleList(nn.Linear(3, 3, bias=False, dtype=torch.float64) for _ in range(count))
        for index, expert in enumerate(self.experts):
            expert.weight = nn.Parameter(weights[first + index].clone())

    def forward(self, tokens: list[torch.Tensor]) -> torch.Tensor:
        return sum(expert(part).square().sum() for expert, part in zip(self.experts, tokens, strict=True))


def train_experts(rank: int, world_size: int) -> tuple[dict, list[dict]]:
    edp, ep = (rank // 2, rank % 2) if world_size == 4 else (0, 0)
    count, data_parts = (2, 2) if world_size == 4 else (4, 1)
    model, first = Experts(ep * 2, count), ep * 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    groups = [dist.new_group([ep_, ep_ + 2]) for ep_ in (0, 1)] if world_size == 4 else [None]
    torch.manual_seed(5)
    # Experts get different numbers of tokens, one of them none at all.
    routed = [torch.randn(2, n, 3, dtype=torch.float64) for n in (4, 0, 2, 6)]
    layout = ParallelLayout.from_sizes({"dp": world_size}, expert={"edp": data_parts, "ep": world_size // data_parts})
    kept = GatheringAggregator()
    with telemetry.watch(
        model,
        to=kept,
        optimizer=optimizer,
        select="experts.*",
        every=1,
        layout=layout,
        experts="experts.*",
        site_names=lambda name: _expert_name(name, first),
    ) as session:
        for step in STEPS:
            with session.step(step):
                optimizer.zero_grad()
                model([routed[first + i][step - 1].chunk(data_parts)[edp] for i in range(count)]).backward()
                for parameter in model.parameters():
                    if groups[ep] is not None:
                        dist.all_reduce(parameter.grad, group=groups[ep])
                optimizer.step()
    return record_of(kept), [dict(f) for p in kept.packets for f in check_step(p, kept.sites().values())]


def _expert_name(name: str, first: int) -> str:
    parts = name.split(".")
    if len(parts) > 1:
        parts[1] = str(int(parts[1]) + first)
    return ".".join(parts)


def test_experts_on_their_own_grid_give_the_record_of_all_experts():
    reference, _ = run_ranks(train_experts, 1)[0]
    found, findings = run_ranks(train_experts, 4)[0]
    assert len(reference) == 2 * (4 * 5)
    assert_same_record(found, reference, rel=1e-9)
    assert findings == []
