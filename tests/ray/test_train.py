"""Ray Train: a worker loop that attaches in three lines, and a run whose workers fail and are started again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from aggregator import open_history

STEPS = 6


def worker_loop(config: dict[str, Any]) -> None:
    """Train a tiny model; at each step of ``config["fail_at"]`` rank 1 raises, the first time that it comes there."""
    import ray.train
    import ray.train.torch
    from torch import nn

    import telemetry
    from aggregator.ray_actor.train import train_layout

    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = 1
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            first = json.loads(Path(folder, "step.json").read_text()) + 1
    rank = ray.train.get_context().get_world_rank()
    with telemetry.watch(
        model,
        optimizer=optimizer,
        to=config["to"],
        every=1,
        layout=train_layout(),
        # A rank that fails waits so long for the others, who hang in a collective of the training.
        deadlines=telemetry.Deadlines(close_s=6),
        resume_step=first if first > 1 else None,
    ) as session:
        for step in range(first, STEPS + 1):
            with session.step(step):
                optimizer.zero_grad()
                model(torch.full((3, 4), float(rank + step))).sum().backward()
                optimizer.step()
            marker = Path(config["folder"], f"failed-{step}")
            if rank == 1 and step in config["fail_at"] and not marker.exists():
                marker.touch()
                raise RuntimeError(f"a fault at step {step}")
            report(step, rank, config["checkpoint_at"])
    Path(config["folder"], f"report-{rank}.json").write_text(json.dumps(session.report.merge.num_committed))


def report(step: int, rank: int, checkpoint_at: int) -> None:
    import ray.train

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if step == checkpoint_at and rank == 0:
            Path(folder, "step.json").write_text(json.dumps(step))
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"step": step}, checkpoint=checkpoint)


class Shown:
    """Keeps what the callback shows, from the controller's process, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, status: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([status.state, status.account.num_committed]) + "\n")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("fail_at", "segments"),
    [
        # Step 4 is run again after the checkpoint of step 3.
        ((4,), [None, 4]),
        # The failure at step 2 comes before any checkpoint: the job begins anew, in its own directory.
        pytest.param((2, 4), [None, 0, 4], marks=pytest.mark.full),
    ],
    ids=["after-a-checkpoint", "before-and-after"],
)
def test_a_failed_worker_restarts_into_a_new_segment_and_each_step_is_shown_once(
    cluster, name, tmp_path, fail_at, segments
):
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from aggregator.ray_actor.train import RecordCallback

    shown = Shown(tmp_path / "shown")
    run = tmp_path / "run"
    to = f"ray://{name.replace('.', '-')}?dir={run}"
    config = {"to": to, "folder": str(tmp_path), "fail_at": fail_at, "checkpoint_at": 3}
    trainer = TorchTrainer(
        worker_loop,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name=name,
            storage_path=str(tmp_path / "storage"),
            failure_config=FailureConfig(max_failures=len(fail_at)),
            callbacks=[RecordCallback(to, shown, every_s=0.0)],
        ),
    )
    trainer.fit()
    history = open_history(run)
    assert [(row["step"], row["num_ranks"], row["world_size"]) for row in history.coverage().to_pylist()] == [
        (step, 2, 2) for step in range(1, STEPS + 1)
    ]
    assert [row["resume_step"] for row in history.segments().to_pylist()] == segments
    written_again = history.steps(include_superseded=True).num_rows - STEPS
    assert written_again >= len(fail_at)
    assert history.manifest["run"]["layout"]["axes"] == [["dp", 2]]
    assert history.manifest["run"]["layout"]["declared"]
    # Three rows of two outputs from each of two workers.
    assert history.series("Linear", "activation", "total").column("value").to_pylist() == [2 * 3 * 2] * STEPS
    assert [json.loads((tmp_path / f"report-{rank}.json").read_text()) for rank in (0, 1)] == [STEPS - 3] * 2
    states = [json.loads(line)[0] for line in shown.path.read_text().splitlines()]
    assert "merging" in states


@pytest.mark.full
@pytest.mark.timeout(400)
def test_the_demo_runs_under_ray_train_with_one_record_of_both_workers(tmp_path):
    out = tmp_path / "run"
    command = [str(Path(sys.executable).with_name("rankfold")), "demo", "--ray", "--out", str(out)]
    done = subprocess.run(
        [*command, "--steps", "6", "--every", "3", "--hist-every", "6"],
        capture_output=True,
        text=True,
        timeout=380,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
    )
    assert done.returncode == 0, done.stderr
    for text in ("Rankfold plan", "layout dp 2", "step 6/6", "Rankfold report", "Gradient rms that moved most"):
        assert text in done.stdout, done.stdout
    history = open_history(out)
    assert history.steps().column("step").to_pylist() == [1, 3, 6]
    assert set(history.coverage().column("num_ranks").to_pylist()) == {2}
    assert (out / "record.jsonl").exists()


def test_axes_that_do_not_divide_the_workers_are_refused(monkeypatch):
    from aggregator.ray_actor import train
    from telemetry.errors import LayoutMismatchError

    class Context:
        get_world_size = staticmethod(lambda: 6)
        get_world_rank = staticmethod(lambda: 0)

    monkeypatch.setattr(train, "get_context", Context)
    assert dict(train.train_layout(tp=3).axes) == {"dp": 2, "tp": 3}
    assert dict(train.train_layout().axes) == {"dp": 6}
    with pytest.raises(LayoutMismatchError, match="do not divide the 6 workers"):
        train.train_layout(tp=4)
