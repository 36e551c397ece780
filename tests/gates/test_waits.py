"""A wait that observing adds fails the gate that counts them, off cadence and for each site."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from launch.gates.discover import gates_named
from launch.gates.verdict import judge
from launch.gates.waits import beyond, count_waits
from tests.ranks import run_ranks

NAME = "zero-syncs"


def measured_by(rank: int, world_size: int, to, sabotage) -> dict:
    module = gates_named([NAME])[0].run.__globals__
    with pytest.MonkeyPatch.context() as patch:
        # Fewer and smaller than in the gate, to be short.
        patch.setitem(module, "BLOCKS", (1, 3))
        patch.setitem(module, "COUNTED_STEPS", 1)
        if sabotage is not None:
            sabotage(patch)
        return dict(module["measure"](torch.device("cpu"), to))


def wait_for_each_site(patch) -> None:
    from telemetry.staging import StagingBuffer

    observe = StagingBuffer.observe

    def waiting(self, slot, tensor, **options):
        tensor.reshape(-1)[0].item()
        observe(self, slot, tensor, **options)

    patch.setattr(StagingBuffer, "observe", waiting)


def wait_in_every_step(patch) -> None:
    from telemetry import Session

    step = Session.step

    def waiting(self, *args, **options):
        torch.ones(()).item()
        return step(self, *args, **options)

    patch.setattr(Session, "step", waiting)


@pytest.mark.parametrize(
    ("sabotage", "names"),
    [
        (None, []),
        (wait_for_each_site, ["host waits that more blocks add", "host waits on cadence"]),
        (wait_in_every_step, ["host waits off cadence is 1"]),
    ],
)
def test_one_more_wait_is_failed_by_the_quantity_that_it_belongs_to(sabotage, names, tmp_path):
    gate = gates_named([NAME])[0].gate
    measured = run_ranks(measured_by, 2, tmp_path / "run", sabotage)[0]
    measured.pop("counts by sort on rank 0")
    state, reason, _ = judge(gate, measured, is_rehearsal=True)
    assert state == ("failed" if names else "passed"), reason
    for part in names:
        assert part in reason


@pytest.mark.parametrize(
    ("wait", "num_waits"),
    [
        (lambda x: x.sum().item(), 1),
        (lambda x: bool(x.any()), 1),
        (lambda x: x.nonzero(), 1),
        (lambda x: x.cpu(), 1),
        (lambda x: [y.item() for y in x], 3),
        (lambda x: x * 2, 0),
    ],
)
def test_what_would_wait_for_a_gpu_is_counted_on_a_cpu(wait, num_waits):
    with count_waits(torch.device("cpu")) as waits:
        wait(torch.ones(3))
    assert max(waits.values(), default=0) == num_waits
    assert beyond(waits, Counter()) == num_waits
    assert beyond(waits, waits) == 0
