"""What leaves a device leaves in a constant number of transfers, and nothing waits before."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import telemetry
from telemetry import staging
from telemetry.summary import DEFAULT_DESCRIPTOR, TensorSummary, summarize
from tests.aggregators import KeepingAggregator

# Operators that make the host wait for an accelerator, or whose output size depends on data.
SYNCHRONISING = {
    "aten._local_scalar_dense.default",
    "aten.nonzero.default",
    "aten.masked_select.default",
    "aten.is_nonzero.default",
    "aten.equal.default",
    "aten._unique2.default",
    "aten.bincount.default",
}


# Methods of a tensor that bring its elements to the host.
HOST_READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__"}


class CountSyncs(TorchDispatchMode):
    """Counts what would make the host wait for an accelerator, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func) in SYNCHRONISING:
            self.syncs[str(func)] += 1
        return func(*args, **(kwargs or {}))


class CountHostReads(TorchFunctionMode):
    """Counts the calls that read elements on the host, which on a CPU reach no operator."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in HOST_READS or (name == "to" and "cpu" in map(str, args[1:])):
            self.reads[name] += 1
        return func(*args, **(kwargs or {}))


def host_waits(num_layers: int, *, watched: bool, every: int, scaled: bool = False) -> dict[str, int]:
    """Count what waits in the second step of a loop, of the loop and of a session together."""
    model = nn.Sequential(*(Observing() for _ in range(num_layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    options = {"call_sites": ("hidden",), "every": every, "hist_every": every}
    session = telemetry.watch(model, to=KeepingAggregator(), optimizer=optimizer, **options) if watched else None
    for step in (1, 2):
        scope = session.step(step, scaler=scaler) if session else nullcontext()
        with CountSyncs() as operators, CountHostReads() as reads, scope:
            scaler.scale(model(torch.ones(2, 4)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    if session:
        session.close()
    return operators.syncs + reads.reads


class Observing(nn.Linear):
    """A layer with a call site."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        telemetry.observe_tensor(self, "x", "hidden", x, batch_dim=0)
        return super().forward(x)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_that_is_not_due_waits_no_more_often_than_an_unobserved_one(scaled):
    unobserved = host_waits(3, watched=False, every=1, scaled=scaled)
    assert host_waits(3, watched=True, every=1000, scaled=scaled) == unobserved


@pytest.mark.parametrize("scaled", [False, True])
def test_a_logged_step_waits_a_constant_number_of_times_however_many_sites(scaled):
    few, many = (host_waits(n, watched=True, every=1, scaled=scaled) for n in (2, 40))
    unobserved = {n: host_waits(n, watched=False, every=1, scaled=scaled) for n in (2, 40)}
    few.subtract(unobserved[2])
    many.subtract(unobserved[40])
    assert +few == +many
    # The rows and the histograms, each copied once and then viewed; a scaler's scale is read once, and counts twice
    # here: as a method and as the operator that it calls.
    scale = {"item": 1, "aten._local_scalar_dense.default": 1} if scaled else {}
    assert +few == {"cpu": 2, "numpy": 2, **scale}


def test_a_logged_step_takes_one_transfer_of_rows_and_one_of_histograms(monkeypatch):
    transfers, to_host = [], staging._to_host
    monkeypatch.setattr(staging, "_to_host", lambda *args: transfers.append(1) or to_host(*args))
    model = nn.Linear(4, 4)
    with telemetry.watch(model, to=KeepingAggregator(), every=1, hist_every=1) as session, session.step(1):
        model(torch.ones(2, 4)).sum().backward()
    assert len(transfers) == 2


@pytest.mark.parametrize("num_calls", [1, 3])
def test_calls_fold_in_the_slot_as_they_would_on_the_host(num_calls):
    torch.manual_seed(0)
    buffer = staging.StagingBuffer(torch.device("cpu"), DEFAULT_DESCRIPTOR)
    parts = [torch.randn(50) for _ in range(num_calls)]
    slots = [buffer.new_slot() for _ in range(100)]
    for part in parts:
        buffer.observe(slots[70], part, histogram=True)
    staged = buffer.drain()
    expected = TensorSummary.empty()
    for part in parts:
        expected = expected.merge(summarize(part, histogram=True))
    assert staged.slots.tolist() == staged.hist_slots.tolist() == [70]
    row = TensorSummary(staged.ints[0], staged.floats[0])
    assert row.total == expected.total
    assert row.m4 == pytest.approx(expected.m4, rel=1e-13)
    assert staged.hist_counts[0].tolist() == expected.histogram.counts.tolist()


def test_a_drained_buffer_starts_from_nothing():
    buffer = staging.StagingBuffer(torch.device("cpu"), DEFAULT_DESCRIPTOR)
    slot = buffer.new_slot()
    for value in (1.0, 2.0):
        buffer.observe(slot, torch.full((3,), value), histogram=True)
        staged = buffer.drain()
        assert TensorSummary(staged.ints[0], staged.floats[0]).sum == 3 * value
        assert staged.hist_counts.sum() == 3
    assert len(buffer.drain().slots) == 0
