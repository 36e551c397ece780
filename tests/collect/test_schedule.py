"""Cadence: due is a function of the global step alone, and what is not due costs nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import telemetry
from telemetry.collect.schedule import Schedule
from telemetry.errors import PeerLostError
from tests.aggregators import KeepingAggregator


def logged_steps(steps, **options) -> list[int]:
    model, kept = nn.Linear(1, 1), KeepingAggregator()
    with telemetry.watch(model, to=kept, signals=("parameters",), **options) as session:
        for step in steps:
            with session.step(step):
                pass
    return kept.steps


def test_multiples_of_the_interval_are_logged_beside_the_first_and_the_last():
    assert logged_steps(range(1, 12), every=4, last_step=11) == [1, 4, 8, 11]


def test_a_loop_that_counts_from_zero_and_reports_after_every_third_step_has_the_same_rows():
    assert logged_steps(range(9), every=3, due_offset=1, first_step=False) == [2, 5, 8]
    histograms = Schedule(every={}, hist_every=6, first_step=False, offset=1)
    assert [step for step in range(13) if histograms.histogram_due(step, is_first=step == 0)] == [5, 11]


@pytest.mark.parametrize("first", [1, 201, 401])
def test_a_resumed_loop_logs_the_same_global_steps(first):
    assert [s for s in logged_steps(range(first, 552), every=50) if s % 50 == 0] == [
        s for s in range(50, 552, 50) if s >= first
    ]


def test_each_signal_has_its_own_interval():
    schedule = Schedule.build(("activations", "gradients"), {"activations": 6, "gradients": 4}, None, None)
    assert schedule.due(6, is_first=False) == {"activations"}
    assert schedule.due(12, is_first=False) == {"activations", "gradients"}
    assert schedule.due(7, is_first=False) == frozenset()


def test_histograms_come_at_their_own_interval():
    model, kept = nn.Linear(1, 1), KeepingAggregator()
    with telemetry.watch(model, to=kept, signals=("parameters",), every=1, hist_every=3) as session:
        for step in range(2, 8):
            with session.step(step):
                pass
    assert [packet.step for packet in kept.packets if len(packet.hist_sites)] == [2, 3, 6]


def test_ten_thousand_steps_that_are_not_due_work_and_write_nothing():
    assert logged_steps(range(1, 10_001), every=20_000) == [1]


def test_when_merging_has_stopped_due_steps_are_counted_as_not_recorded():
    model, kept = nn.Linear(1, 1), KeepingAggregator()
    with telemetry.watch(model, to=kept, signals=("parameters",), every=1) as session:
        for step in (1, 2, 3):
            with session.step(step):
                model(torch.ones(1))
            kept.failure = PeerLostError("rank 1 is gone")
    assert kept.steps == [1]
    assert session.report.num_unlogged == 2
    assert "2 due steps were not recorded" in str(session.report)
