"""Time and memory that observing adds fail the gates that bound them; the clock of the test is a count of work."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from launch.gates.discover import gates_named
from launch.gates.verdict import judge
from telemetry.staging import StagingBuffer
from tests.ranks import run_ranks

STEP, CHEAP, DEAR = 1.0, 1e-5, 1e-2


def patched_overhead(rank: int, world_size: int, to, cost_on: float, cost_off: float) -> dict:
    """Measure by a clock that a step moves by one, a reduced tensor by ``cost_on``, and every scope by ``cost_off``."""
    module, now = gates_named(["overhead"])[0].run.__globals__, [0.0]

    def spend(amount, function):
        def spending(*args, **kwargs):
            now[0] += amount
            return function(*args, **kwargs)

        return spending

    from telemetry import Session

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
        patch.setitem(module, "loss_of", spend(STEP, module["loss_of"]))
        patch.setattr(StagingBuffer, "observe", spend(cost_on, StagingBuffer.observe))
        patch.setattr(Session, "step", spend(cost_off, Session.step))
        patch.setitem(module, "ON_CPU", module["Size"](1, 2, 4, 2, 4, 5, 2))
        return dict(module["measure"](torch.device("cpu"), to))


@pytest.mark.parametrize(
    ("cost_on", "cost_off", "names"),
    [
        pytest.param(CHEAP, CHEAP, [], marks=pytest.mark.full),
        (DEAR, CHEAP, ["time of a step on cadence, relative"]),
        (CHEAP, 2 * DEAR, ["time of a step off cadence, relative is 1.02"]),
    ],
)
def test_time_that_observing_adds_fails_by_the_quantity_that_it_belongs_to(cost_on, cost_off, names, tmp_path):
    gate = gates_named(["overhead"])[0].gate
    measured = run_ranks(patched_overhead, 2, tmp_path / "run", cost_on, cost_off)[0]
    values = {limit.name: measured[limit.name] for limit in gate.limits}
    state, reason, _ = judge(gate, values, is_rehearsal=False)
    assert state == ("failed" if names else "passed"), reason
    assert [part.rpartition(" is ")[0] or part for part in names] == [
        r.partition(" is ")[0] for r in reason.split("; ") if r
    ]
    assert all(part in reason for part in names)


def growth(rank: int, world_size: int, to, leak_bytes: int) -> dict:
    """Measure over few steps, while every drained buffer leaves something behind on the last rank."""
    module, kept = gates_named(["memory"])[0].run.__globals__, []
    drain = StagingBuffer.drain

    def leaking(self):
        kept.append(b"\1" * leak_bytes)
        return drain(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module, "WARM_STEPS", 20)
        patch.setitem(module, "BETWEEN_ON_CPU", 20)
        if rank == world_size - 1:
            patch.setattr(StagingBuffer, "drain", leaking)
        return dict(module["measure"](torch.device("cpu"), to))


@pytest.mark.parametrize("leak_bytes", [pytest.param(0, marks=pytest.mark.full), 1 << 20])
def test_a_buffer_that_is_kept_after_every_logged_step_fails_the_limit_of_host_memory(leak_bytes, tmp_path):
    gate = gates_named(["memory"])[0].gate
    measured = run_ranks(growth, 2, tmp_path / "run", leak_bytes)[0]
    values = {limit.name: measured[limit.name] for limit in gate.limits if limit.name in measured}
    _, reason, _ = judge(gate, values, is_rehearsal=True)
    assert ("growth of resident host memory is" in reason) is (leak_bytes > 0), reason
