"""A loop that goes back to a checkpoint in the same process begins a new segment; the record has one row a step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import telemetry
from aggregator import open_history
from telemetry.errors import StepOrderError
from tests.aggregators import KeepingAggregator
from tests.ranks import run_ranks
from tests.watch.jobs import DEADLINES


def run_loop(rank: int, world_size: int, to, plan, **options):
    """Log the steps of ``plan``, where (step, value, is_new_segment); the parameter holds ``value`` in that step."""
    model = nn.Linear(1, 1, bias=False)
    options = {"signals": ("parameters",), "every": 1, "deadlines": DEADLINES, "health": False, **options}
    with telemetry.watch(model, to=to, **options) as session:
        for step, value, new_segment in plan:
            with torch.no_grad():
                model.weight.fill_(value)
            with session.step(step, new_segment=new_segment):
                pass
    return session.report.merge


def means(history, **options) -> list[tuple[int, int, float]]:
    table = history.observations(columns=["step", "segment", "mean"], **options)
    return sorted(zip(*(table[name].to_pylist() for name in ("step", "segment", "mean")), strict=True))


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_last_attempt_of_a_step_is_shown_and_the_others_are_kept(world_size, tmp_path):
    plan = [(1, 1.0, False), (2, 2.0, False), (3, 3.0, False), (2, 20.0, True), (3, 30.0, False), (4, 40.0, False)]
    reports = run_ranks(run_loop, world_size, tmp_path / "run", plan)
    assert [(report.num_committed, report.failure) for report in reports] == [(6, None)] * world_size
    history = open_history(tmp_path / "run")
    assert means(history) == [(1, 0, 1.0), (2, 1, 20.0), (3, 1, 30.0), (4, 1, 40.0)]
    everything = means(history, include_superseded=True)
    assert [row for row in everything if row[1] == 0] == [(1, 0, 1.0), (2, 0, 2.0), (3, 0, 3.0)]
    segments = history.segments().to_pylist()
    assert [(s["segment"], s["resume_step"], s["last_step"], s["sealed"]) for s in segments] == [
        (0, None, 3, True),
        (1, 2, 4, True),
    ]


def test_a_segment_begins_at_the_step_that_is_given_also_where_that_is_not_due(tmp_path):
    plan = [(step, float(step), False) for step in range(1, 7)] + [(3, 30.0, True), (4, 40.0, False)]
    run_loop(0, 1, tmp_path / "run", plan, every=2, first_step=False)
    history = open_history(tmp_path / "run")
    assert means(history) == [(2, 0, 2.0), (4, 1, 40.0)]
    assert history.segments()["resume_step"].to_pylist() == [None, 3]


def test_the_first_step_of_a_segment_is_logged_as_the_first_step_of_a_session_is(tmp_path):
    plan = [(step, float(step), False) for step in range(1, 7)] + [(3, 30.0, True), (4, 40.0, False)]
    run_loop(0, 1, tmp_path / "run", plan, every=4)
    assert means(open_history(tmp_path / "run")) == [(1, 0, 1.0), (3, 1, 30.0), (4, 1, 40.0)]


def test_a_segment_in_which_nothing_was_logged_is_stepped_over(tmp_path):
    model = nn.Linear(1, 1)
    with telemetry.watch(model, to=tmp_path / "run", signals=("parameters",), every=1) as session:
        with session.step(5):
            pass
        with pytest.raises(RuntimeError, match="diverged"), session.step(3, new_segment=True):
            raise RuntimeError("diverged")
        with session.step(2, new_segment=True):
            pass
    assert session.report.merge.failure is None
    history = open_history(tmp_path / "run")
    assert history.steps()["step"].to_pylist() == [2]
    assert history.segments()["segment"].to_pylist() == [0, 1, 2]


def test_going_back_without_saying_so_is_refused_and_the_session_goes_on():
    model, kept = nn.Linear(1, 1), KeepingAggregator()
    with telemetry.watch(model, to=kept, signals=("parameters",), every=1) as session:
        with session.step(5):
            pass
        for step in (5, 3):
            with pytest.raises(StepOrderError, match="new_segment=True"):
                session.step(step)
        with session.step(6):
            pass
    assert kept.steps == [5, 6]
    assert [(packet.segment, packet.resume_step) for packet in kept.packets] == [(0, None)] * 2


def go_back_on_rank_one_alone(rank: int, world_size: int, to):
    report = run_loop(rank, world_size, to, [(1, 1.0, False), (2, 2.0, rank == 1), (3, 3.0, False)])
    return report.failure.code, str(report.failure)


def test_a_rank_that_goes_back_alone_is_named_on_all_ranks(tmp_path):
    for code, text in run_ranks(go_back_on_rank_one_alone, 2, tmp_path / "run"):
        assert code == "packet_malformed"
        assert "segment 1 step 2" in text
        assert "segment 0 step 2" in text
    assert open_history(tmp_path / "run").steps()["step"].to_pylist() == [1, 2]
