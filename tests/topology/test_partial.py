"""Tensors whose local value is not the tensor's: partial sums, and results that a collective still brings."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

import telemetry
from aggregator.checks import check_step
from telemetry import Presence
from tests.aggregators import GatheringAggregator
from tests.ranks import run_ranks

HELD = ([1.0, 3.0], [2.0, 1.0])


class Returns(nn.Module):
    def __init__(self, make) -> None:
        super().__init__()
        self.make = make

    def forward(self, _):
        return self.make()


def observe_partial(rank: int, world_size: int, reduce_partial: bool) -> tuple:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = nn.Sequential(Returns(lambda: DTensor.from_local(torch.tensor(HELD[rank]), mesh, [Partial()])))
    kept = GatheringAggregator()
    options = {"signals": ("activations",), "every": 1, "layout": mesh, "reduce_partial": reduce_partial}
    with telemetry.watch(model, to=kept, **options) as session, session.step(1):
        model(torch.ones(1))
    presence, reason = kept.presence("activation", "0", 1)
    found = kept.summary("activation", "0", 1).to_dict() if presence is Presence.OBSERVED else None
    return presence.label, reason, found, [f["code"] for f in check_step(kept.packets[0], kept.sites().values())]


def test_a_partial_sum_is_refused_visibly_where_nobody_asked_to_reduce_it():
    for presence, reason, found, _ in run_ranks(observe_partial, 2, False):
        assert (presence, found) == ("unsupported", None)
        assert "partial over tp" in reason
        assert "reduce_partial=True" in reason


def test_a_partial_sum_that_is_reduced_has_the_norm_of_the_sum_once():
    for presence, _, found, findings in run_ranks(observe_partial, 2, True):
        assert presence == "observed"
        assert found is not None
        assert (found["total"], found["l2"]) == (2, 5.0)
        assert findings == []


def observe_promise(rank: int, world_size: int) -> tuple[str, float]:
    def gather():
        return funcol.all_gather_tensor(torch.full((3,), float(rank + 1)), 0, dist.group.WORLD)

    model, kept = nn.Sequential(Returns(gather)), GatheringAggregator()
    layout = telemetry.ParallelLayout.from_sizes({"tp": 2})
    with telemetry.watch(model, to=kept, layout=layout, signals=("activations",), every=1) as session, session.step(1):
        model(torch.ones(1))
    return kept.presence("activation", "0", 1)[0].label, kept.summary("activation", "0", 1).sum


def test_a_result_that_a_collective_still_brings_is_waited_for():
    assert run_ranks(observe_promise, 2) == [("observed", 9.0)] * 2


def infinite_on_one_rank(rank: int, world_size: int) -> dict:
    torch.manual_seed(0)
    model, kept = nn.Linear(2, 2), GatheringAggregator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"optimizer": optimizer, "signals": ("gradients",), "every": 1}
    with telemetry.watch(model, to=kept, **options) as session, session.step(1):
        # No all-reduce and no shared scaler: what the ranks hold differs, and nobody else would say so.
        model(torch.full((1, 2), float("inf") if rank == 1 else 1.0)).sum().backward()
        optimizer.step()
    packet = kept.packets[0]
    row = packet.sites.tolist().index(kept.sites()["gradient", "weight"].site_id)
    findings = [f for f in check_step(packet, kept.sites().values()) if f["site"] == "weight"]
    return {
        "num": int(packet.num_nonfinite_ranks[row]),
        "first": int(packet.first_nonfinite_rank[row]),
        "finite": kept.summary("gradient", "weight", 1).finite,
        "findings": [(f["code"], f["ranks"], f["beyond_tolerance"]) for f in findings],
    }


@pytest.mark.parametrize("rank", [0, 1])
def test_a_replica_with_infinity_on_one_rank_is_flagged_and_that_rank_is_named(rank):
    found = run_ranks(infinite_on_one_rank, 2)[rank]
    assert (found["num"], found["first"], found["finite"]) == (1, 1, 4)
    assert found["findings"] == [("replica_disagreement", [1], True)]
