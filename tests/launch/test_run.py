"""``rankfold run`` on one host: restarts, signals, and two jobs that want one directory."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from aggregator import open_history
from tests.launch.started import RANKFOLD, SCRIPT, command, finish, start, step_of, told, wait_until

pytestmark = pytest.mark.timeout(400)


def steps_and_segments(run: Path) -> tuple[list[int], list[int]]:
    rows = open_history(run).steps().select(["step", "segment"]).to_pydict()
    return rows["step"], rows["segment"]


@pytest.mark.parametrize("num_kills", [2, pytest.param(5, marks=pytest.mark.full)], ids=["twice", "five times"])
def test_a_rank_that_is_killed_again_and_again_costs_a_segment_each_time_and_no_step(num_kills, tmp_path):
    kills = [2 * attempt + 1 for attempt in range(num_kills)]
    words = ["--steps", str(kills[-1] + 3), "--checkpoint", str(tmp_path / "checkpoint")]
    words += ["--kill-at", ",".join(map(str, kills))]
    code, _, errors = finish(start(command(tmp_path, *words, options=["--max-restarts", str(num_kills)])))
    assert code == 0, errors[-3000:]
    steps, segments = steps_and_segments(tmp_path / "run")
    assert steps == list(range(1, kills[-1] + 4))
    # The first attempt dies before any checkpoint, so the second begins at step 1 again and takes its place.
    assert set(segments) == set(range(1, num_kills + 1))
    environments = told(tmp_path)
    assert {attempt for attempt, _ in environments} == set(range(num_kills + 1))
    assert len({env["RANKFOLD_JOB"] for env in environments.values()}) == 1
    assert len({env["RANKFOLD_NONCE"] for env in environments.values()}) == num_kills + 1
    # Nothing of the launcher is imported into a rank.
    assert [env["launch"] for env in environments.values()] == [[]] * len(environments)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_to_the_launcher_ends_all_ranks_and_leaves_every_merged_step(number, tmp_path):
    job = start(command(tmp_path, "--steps", "100000", "--pause", "0.2"))
    wait_until(lambda: step_of(tmp_path, 0) >= 5, "step 5", job)
    done = step_of(tmp_path, 0)
    launcher = int(Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()[0])
    os.kill(launcher, number)
    code, _, errors = finish(job)
    assert code == 128 + number, errors[-3000:]
    steps, _ = steps_and_segments(tmp_path / "run")
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= done - 1


def test_the_scripts_own_handler_runs_after_what_was_pending_is_durable(tmp_path):
    job = start(command(tmp_path, "--steps", "100000", "--pause", "0.2", "--own-handler", "--alone"))
    wait_until(lambda: min(step_of(tmp_path, 0), step_of(tmp_path, 1)) >= 3, "step 3", job)
    launcher = int(Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()[0])
    os.kill(launcher, signal.SIGTERM)
    code, _, errors = finish(job)
    assert code == 128 + signal.SIGTERM, errors[-3000:]
    assert sorted(path.name for path in tmp_path.glob("handler-*")) == ["handler-0", "handler-1"]
    assert len(steps_and_segments(tmp_path / "run")[0]) >= 3


def test_a_signal_to_one_rank_is_a_restart_and_the_record_goes_on(tmp_path):
    words = ["--steps", "12", "--pause", "0.3", "--checkpoint", str(tmp_path / "checkpoint")]
    job = start(command(tmp_path, *words, options=["--max-restarts", "1"]))
    wait_until(lambda: step_of(tmp_path, 1) >= 4, "step 4", job)
    os.kill(int((tmp_path / "pid-0-1").read_text()), signal.SIGTERM)
    code, _, errors = finish(job)
    assert code == 0, errors[-3000:]
    steps, segments = steps_and_segments(tmp_path / "run")
    assert steps == list(range(1, 13))
    assert set(segments) == {0, 1}


def test_of_two_jobs_that_want_one_directory_one_runs_and_the_other_is_refused_by_name(tmp_path):
    jobs = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        jobs.append(start(command(tmp_path / name, "--steps", "6", to=tmp_path / "run")))
    ended = [finish(job) for job in jobs]
    assert sorted(code for code, _, _ in ended) == [0, 1]
    (refused,) = (errors for code, _, errors in ended if code == 1)
    assert "run_directory_in_use" in refused
    assert str(tmp_path / "run") in refused
    assert steps_and_segments(tmp_path / "run")[0] == list(range(1, 7))


@pytest.mark.parametrize(
    ("options", "attempt"),
    [(["--standalone"], None), (["--rdzv-backend", "rankfold", "--rdzv-endpoint", "localhost:0"], "0")],
    ids=["as ever", "with our rendezvous"],
)
def test_a_script_that_torchrun_starts_by_itself_records_as_well(options, attempt, tmp_path):
    torchrun = str(Path(RANKFOLD).with_name("torchrun"))
    words = ["timeout", "-k", "5", "150", torchrun, *options, "--local-addr", "localhost", "--nproc-per-node", "2"]
    environ = {**os.environ, "RANKFOLD_TO": str(tmp_path / "run"), "OMP_NUM_THREADS": "1"}
    code, _, errors = finish(start([*words, SCRIPT, "--out", str(tmp_path), "--steps", "3"], environ))
    assert code == 0, errors[-3000:]
    assert steps_and_segments(tmp_path / "run")[0] == [1, 2, 3]
    assert {env["RANKFOLD_ATTEMPT"] for env in told(tmp_path).values()} == {attempt}
