"""A run without a directory: all ranks merge into the memory of rank zero, and stop together once it is full."""

from __future__ import annotations

import pytest
import torch

import telemetry
from aggregator import open_history
from telemetry.errors import ConfigurationError, HistoryFullError
from tests.collective.worlds import wait_until
from tests.ranks import run_ranks
from tests.watch.jobs import STEPS, train


def _train(rank, world_size, to):
    seen = []

    def on_step(session):
        # The merge has time to tell before the next step begins.
        coordinator = session._aggregator._coordinator
        wait_until(lambda: coordinator.num_settled == session._num_logged or session.failure is not None)
        if rank == 0:
            seen.append(open_history(to).steps().num_rows)

    report = train(rank, world_size, to, on_step=on_step)["report"]
    if rank != 0:
        return report, None, None
    history = open_history(to)
    return report, seen, (history.steps()["step"].to_pylist(), history.series("body.0.weight", "gradient", "l2"))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_merge_into_the_memory_of_rank_zero_which_reads_it_during_the_run(world_size):
    results = run_ranks(_train, world_size, "memory://watched")
    _, seen, (steps, series) = results[0]
    assert steps == seen == list(range(1, STEPS + 1))
    assert series["step"].to_pylist() == steps
    assert min(series["value"].to_pylist()) > 0
    assert {(report.merge.failure, report.merge.num_committed) for report, *_ in results} == {(None, STEPS)}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_full_memory_is_refused_on_all_ranks_before_the_next_due_step_is_observed(world_size):
    for report, *_ in run_ranks(_train, world_size, "memory://?keep=2"):
        assert isinstance(report.merge.failure, HistoryFullError)
        assert "when_full=coarsen" in str(report.merge.failure)
        assert (report.merge.num_committed, report.num_logged, report.num_unlogged) == (2, 2, STEPS - 2)


@pytest.mark.parametrize(("when_full", "steps"), [("drop_oldest", [3, 4]), ("coarsen", [3, 4])])
def test_a_full_memory_lets_go_as_it_was_told_to(when_full, steps):
    (report, seen, (kept, _)), _ = run_ranks(_train, 2, f"memory://?keep=2&when_full={when_full}")
    assert (report.merge.failure, report.merge.num_committed) == (None, STEPS)
    assert seen == [1, 2, 2, 2]
    assert kept == steps


def _refused(rank, world_size, to):
    with pytest.raises(ConfigurationError, match="keep='few'"):
        train(rank, world_size, to)
    return True


def test_a_malformed_destination_in_memory_is_refused_on_all_ranks():
    assert run_ranks(_refused, 2, "memory://?keep=few") == [True, True]


def test_the_destination_may_come_from_the_environment(monkeypatch):
    to = "memory://from-environment?keep=3&when_full=drop_oldest"
    monkeypatch.setenv("RANKFOLD_TO", to)
    model = torch.nn.Linear(2, 2)
    with telemetry.watch(model, signals=["parameters"], every=1) as session:
        for step in range(1, 5):
            with session.step(step):
                model(torch.ones(1, 2)).sum().backward()
    assert open_history("memory://from-environment").steps()["step"].to_pylist() == [2, 3, 4]
    assert session.report.to == to
    assert f"to = {to} (RANKFOLD_TO)" in str(session.plan)


def test_steps_of_training_and_of_evaluation_are_told_apart_in_the_record():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
    with telemetry.watch(model, to="memory://modes", signals=["activations"], every=1) as session:
        for step, training in ((1, True), (2, False), (3, True)):
            model.train(training)
            with session.step(step):
                model(torch.ones(1, 2))
    rows = open_history("memory://modes").observations("0", columns=["step", "mode"]).to_pylist()
    assert [(row["step"], row["mode"]) for row in rows] == [(1, "train"), (2, "eval"), (3, "train")]
