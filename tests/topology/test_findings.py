"""What the merge gives away about a job: elements that overlap or are missing, ranks that do not step together."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import telemetry
from aggregator.checks import check_step
from telemetry import FlatShard, ParallelLayout
from tests.aggregators import GatheringAggregator
from tests.ranks import run_ranks


class Flat(nn.Module):
    """One rank's interval of a flat buffer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(float(size)))

    def forward(self, x):
        return x * self.weight.sum()


def observe_intervals(rank: int, world_size: int, intervals: list[tuple[int, int]]) -> list[tuple]:
    start, end = intervals[rank]
    kept = GatheringAggregator()
    placements = {"weight": {"dp": FlatShard((3, 4), start, end)}}
    options = {"layout": ParallelLayout.from_sizes({"dp": 2}), "placements": placements, "every": 1}
    with telemetry.watch(Flat(end - start), to=kept, signals=("parameters",), **options) as session, session.step(1):
        pass
    findings = check_step(kept.packets[0], kept.sites().values())
    return [(f["code"], f["site"], f["total"], f["numel"]) for f in findings]


@pytest.mark.parametrize(
    ("intervals", "found"),
    [
        ([(0, 7), (7, 12)], []),
        ([(0, 12), (12, 12)], []),
        ([(0, 7), (5, 12)], [("conservation_violated", "weight", 14, 12)]),
        ([(0, 5), (7, 12)], [("conservation_violated", "weight", 10, 12)]),
    ],
)
def test_elements_that_overlap_or_are_missing_are_found_against_the_size_of_the_tensor(intervals, found):
    assert run_ranks(observe_intervals, 2, intervals)[0] == found


def step_apart(rank: int, world_size: int) -> list[tuple]:
    torch.manual_seed(0)
    model, kept = nn.Linear(2, 1), GatheringAggregator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    options = {"optimizer": optimizer, "signals": ("updates",), "every": 1}
    with telemetry.watch(model, to=kept, **options) as session, session.step(1, scaler=scaler):
        value = math.inf if rank == 1 else 1.0
        scaler.scale(model(torch.full((1, 2), value)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    findings = check_step(kept.packets[0], kept.sites().values())
    return [(f["code"], f["ranks"]) for f in findings if f["code"] == "optimizer_disagreement"]


def test_a_rank_that_skips_the_optimizer_alone_is_named():
    assert run_ranks(step_apart, 2)[0] == [("optimizer_disagreement", [1])]
