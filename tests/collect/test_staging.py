"""What leaves a device leaves in a constant number of transfers, and nothing waits before."""

from __future__ import annotations

import pytest
import torch
from torch import nn
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


class CountSyncs(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num_syncs = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_syncs += str(func) in SYNCHRONISING
        return func(*args, **(kwargs or {}))


def transfers_and_syncs(num_layers: int, monkeypatch, *, every: int) -> tuple[int, int]:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    transfers, to_host = [], staging._to_host
    monkeypatch.setattr(staging, "_to_host", lambda *args: transfers.append(1) or to_host(*args))
    with telemetry.watch(model, to=KeepingAggregator(), optimizer=optimizer, every=every, hist_every=every) as session:
        with session.step(1):
            model(torch.ones(2, 4)).sum().backward()
        transfers.clear()
        with CountSyncs() as counter, session.step(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    monkeypatch.setattr(staging, "_to_host", to_host)
    return len(transfers), counter.num_syncs


def test_a_logged_step_takes_one_transfer_of_rows_and_one_of_histograms_however_many_sites(monkeypatch):
    assert transfers_and_syncs(2, monkeypatch, every=1) == (2, 0)
    assert transfers_and_syncs(40, monkeypatch, every=1) == (2, 0)


def test_a_step_that_is_not_due_takes_none(monkeypatch):
    assert transfers_and_syncs(2, monkeypatch, every=1000) == (0, 0)


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
