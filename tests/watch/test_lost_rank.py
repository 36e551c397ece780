"""A rank that dies in mid-run: telemetry names it and gives up, training is left to itself, the record reads."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import telemetry
from aggregator import open_history
from telemetry import errors
from tests.ranks import RankDied, run_ranks


def train_until_killed(rank: int, world_size: int, to: Path, victim: int) -> dict:
    """Train without any communication of its own, so that only telemetry can notice that a rank is gone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4))
    deadlines = telemetry.Deadlines(attach_s=30, merge_s=10, close_s=10)
    session = telemetry.watch(model, to=to, every=1, deadlines=deadlines)
    num_steps, noticed_at, ends = 0, None, time.monotonic() + 40
    while time.monotonic() < ends and noticed_at is None:
        num_steps += 1
        with session.step(num_steps):
            model(torch.ones(2, 4)).sum().backward()
        if rank == victim and num_steps == 5:
            # Its last steps have to leave it first, however busy the machine is.
            time.sleep(3)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
        if session.failure is not None:
            noticed_at = num_steps
    for _ in range(3):
        num_steps += 1
        with session.step(num_steps):
            model(torch.ones(2, 4)).sum().backward()
    session.close()
    return {"report": session.report, "failure": session.failure, "noticed_at": noticed_at}


@pytest.mark.parametrize("victim", [1, 3])
def test_the_others_name_it_go_on_training_and_account_for_what_was_not_recorded(victim, tmp_path):
    to = tmp_path / "run"
    results = run_ranks(train_until_killed, 4, to, victim, may_die={victim}, deadline_s=100)
    assert isinstance(results[victim], RankDied)
    survivors = [result for rank, result in enumerate(results) if rank != victim]
    for result in survivors:
        assert isinstance(result["failure"], errors.PeerLostError | errors.MergeDeadlineError)
        assert victim in result["report"].merge.missing_ranks
        assert result["report"].num_unlogged >= 3
    history = open_history(to)
    steps = history.steps().column("step").to_pylist()
    assert steps == list(range(1, len(steps) + 1))
    coverage = {row["step"]: row for row in history.coverage().to_pylist()}
    assert coverage[4]["num_ranks"] == 4
    assert victim in coverage[steps[-1]]["missing_ranks"]


def fail_in_training(rank: int, world_size: int, to: Path) -> str:
    model = nn.Sequential(nn.Linear(4, 4))
    deadlines = telemetry.Deadlines(attach_s=30, merge_s=10, close_s=10)
    try:
        with telemetry.watch(model, to=to, every=1, deadlines=deadlines) as session:
            for step in range(1, 6):
                with session.step(step):
                    if rank == 1 and step == 3:
                        raise ZeroDivisionError("the loop's own")
                    model(torch.ones(2, 4)).sum().backward()
    except ZeroDivisionError as error:
        return f"raised {error}"
    return str(session.report.merge.failure)


def test_an_exception_of_the_loop_passes_unmasked_and_the_others_hear_that_the_rank_left(tmp_path):
    kept_on, raised = run_ranks(fail_in_training, 2, tmp_path / "run")
    assert raised == "raised the loop's own"
    assert "1" in kept_on
    assert open_history(tmp_path / "run").steps().column("step").to_pylist()[:2] == [1, 2]
