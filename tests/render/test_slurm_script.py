"""The rendered sbatch script under a real bash; programs that record stand in for Slurm and rankfold."""

import json
import os
import signal
import subprocess
import time

import pytest

from launch.render import Target, render
from tests.render.fakes import NAMES, install
from tests.render.specs import SPECS, make_spec

DEADLINE_S = 40
pytestmark = pytest.mark.timeout(100)


class Job:
    """A script under bash, as on the first node of an allocation."""

    def __init__(self, folder, spec, *, doctor="0", train="0", restarts=None, state="RUNNING", early_notice=""):
        self.folder, self.num_nodes = folder, spec.num_nodes
        install(folder / "bin", *NAMES)
        (folder / "job.sbatch").write_text(render(spec, Target.slurm))
        (folder / "hosts").write_text("".join(f"node{i}\n" for i in range(spec.num_nodes)))
        if state is not None:
            (folder / "state").write_text(state)
        variables = {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "FAKES": str(folder),
            "DOCTOR": doctor,
            "TRAIN": train,
            "EARLY_NOTICE": early_notice,
            "SLURM_JOB_ID": "123",
            "SLURM_JOB_NUM_NODES": str(spec.num_nodes),
            "SLURM_JOB_NODELIST": f"node[0-{spec.num_nodes - 1}]",
        }
        if restarts is not None:
            variables["SLURM_RESTART_COUNT"] = str(restarts)
        if spec.num_legs is not None:
            variables |= {"SLURM_ARRAY_JOB_ID": "100", "SLURM_ARRAY_TASK_ID": "2"}
        self.process = subprocess.Popen(
            ["bash", folder / "job.sbatch"], env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=DEADLINE_S)

    def wait_until_ready(self):
        """Wait until the training on every node can be told to end."""
        deadline = time.monotonic() + DEADLINE_S
        while len(list(self.folder.glob("ready-*"))) < self.num_nodes:
            assert self.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def end(self):
        """Wait for the end; return exit code and what was printed."""
        printed, _ = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, printed

    def calls(self, program, verb=None):
        """Return node, words and variables of the calls of a program, by node."""
        lines = [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]
        found = [call[1:] for call in lines if call[0] == program and verb in (None, call[2][0])]
        return sorted(found, key=lambda call: int(call[0] or 0))

    def num_told(self):
        """Return how often each node was told to end."""
        return [len((self.folder / f"told-{node}").read_text()) for node in range(self.num_nodes)]


@pytest.mark.parametrize("num_nodes", [1, 2, 5, pytest.param(64, marks=pytest.mark.full)])
def test_every_node_runs_the_doctor_and_then_rankfold_run_with_the_words_of_the_job(tmp_path, num_nodes):
    spec = make_spec(num_nodes, **SPECS["odd"])
    with Job(tmp_path, spec) as job:
        code, printed = job.end()
    assert code == 0, printed
    doctors, runs = job.calls("rankfold", "doctor"), job.calls("rankfold", "run")
    assert [int(node) for node, _, _ in doctors] == [int(node) for node, _, _ in runs] == list(range(num_nodes))
    for _, words, _ in doctors:
        meeting = ["--nnodes", str(num_nodes), "--rdzv-endpoint", f"node0:{spec.port}"]
        assert words == ["doctor", "--run", spec.to, "--folder", "src dir", *meeting]
    for _, words, variables in runs:
        end = words.index("--")
        assert words[end + 1 :] == list(spec.command)
        assert dict(zip(words[1:end:2], words[2:end:2], strict=True)) == {
            "--to": spec.to,
            "--job": "slurm-123",
            "--grace-s": "60",
            "--nnodes": str(num_nodes),
            "--nproc-per-node": "8",
            "--rdzv-endpoint": "node0:29400",
            "--max-restarts": "3",
        }
        assert variables.items() >= spec.env.items()
    assert job.calls("scontrol", "requeue") == []


def test_srun_starts_one_task_a_node_and_passes_the_cpus_on(tmp_path):
    with Job(tmp_path, make_spec(2, cpus_per_node=48)) as job:
        assert job.end()[0] == 0
    for _, words, _ in job.calls("srun"):
        assert words[:5] == [
            "--ntasks=2",
            "--ntasks-per-node=1",
            "--kill-on-bad-exit=1",
            "--label",
            "--cpus-per-task=48",
        ]


@pytest.mark.parametrize("code", [0, 1, 7, 130])
def test_the_exit_code_of_the_training_is_that_of_the_job_and_no_failure_is_requeued(tmp_path, code):
    with Job(tmp_path, make_spec(), train=str(code)) as job:
        assert job.end()[0] == code
    assert job.calls("scontrol", "requeue") == []


def test_what_the_doctor_finds_ends_the_job_before_the_training(tmp_path):
    with Job(tmp_path, make_spec(), doctor="3") as job:
        assert job.end()[0] == 3
    assert job.calls("rankfold", "run") == []
    assert job.calls("scontrol", "requeue") == []


def test_a_notice_reaches_every_node_once_and_ends_in_a_requeue(tmp_path):
    with Job(tmp_path, make_spec(), train="wait:143") as job:
        job.wait_until_ready()
        job.process.send_signal(signal.SIGTERM)
        code, printed = job.end()
    assert code == 143
    assert job.num_told() == [1, 1]
    assert [words for _, words, _ in job.calls("scontrol", "requeue")] == [["requeue", "123"]]
    assert "requeued, 1 of 10" in printed


@pytest.mark.parametrize(("code", "num_requeues"), [(0, 0), (5, 1)])
def test_what_the_training_does_with_the_notice_decides(tmp_path, code, num_requeues):
    with Job(tmp_path, make_spec(), train=f"wait:{code}") as job:
        job.wait_until_ready()
        job.process.send_signal(signal.SIGTERM)
        assert job.end()[0] == code
    assert job.num_told() == [1, 1]
    assert len(job.calls("scontrol", "requeue")) == num_requeues


def test_a_notice_before_anything_runs_starts_no_training_and_is_requeued(tmp_path):
    with Job(tmp_path, make_spec(), doctor="wait:143", early_notice="yes") as job:
        assert job.end()[0] == 143
    assert job.calls("rankfold", "run") == []
    assert len(job.calls("scontrol", "requeue")) == 1


def test_a_second_notice_is_not_passed_on_because_rankfold_run_would_stop_waiting(tmp_path):
    with Job(tmp_path, make_spec(1), train="wait:143") as job:
        job.wait_until_ready()
        job.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + DEADLINE_S
        while not (tmp_path / "told-0").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        job.process.send_signal(signal.SIGTERM)
        assert job.end()[0] == 143
    assert job.num_told() == [1]
    assert len(job.calls("scontrol", "requeue")) == 1


def test_tasks_that_slurm_told_without_the_script_are_requeued_as_well(tmp_path):
    with Job(tmp_path, make_spec(), train="wait:143") as job:
        job.wait_until_ready()
        os.kill(int((tmp_path / "srun.pid").read_text()), signal.SIGTERM)
        assert job.end()[0] == 143
    assert job.num_told() == [1, 1]
    assert len(job.calls("scontrol", "requeue")) == 1


def test_a_job_that_was_cancelled_is_neither_told_twice_nor_requeued(tmp_path):
    with Job(tmp_path, make_spec(), train="wait:143") as job:
        job.wait_until_ready()
        (tmp_path / "state").write_text("COMPLETING")
        job.process.send_signal(signal.SIGTERM)
        os.kill(int((tmp_path / "srun.pid").read_text()), signal.SIGTERM)
        assert job.end()[0] == 143
    assert job.num_told() == [1, 1]
    assert job.calls("scontrol", "requeue") == []


def test_requeues_have_a_bound(tmp_path):
    with Job(tmp_path, make_spec(max_requeues=4), train="wait:143", restarts=4) as job:
        job.wait_until_ready()
        job.process.send_signal(signal.SIGTERM)
        code, printed = job.end()
    assert code == 143
    assert job.num_told() == [1, 1]
    assert job.calls("scontrol", "requeue") == []
    assert "not requeued again: 4 times are allowed" in printed


def test_the_last_requeue_within_the_bound_is_made(tmp_path):
    with Job(tmp_path, make_spec(max_requeues=4), train="143", restarts=3) as job:
        code, printed = job.end()
    assert code == 143
    assert len(job.calls("scontrol", "requeue")) == 1
    assert "requeued, 4 of 4" in printed


def test_where_the_controller_does_not_answer_the_nodes_are_told_and_nothing_is_requeued(tmp_path):
    with Job(tmp_path, make_spec(), train="wait:143", state=None) as job:
        job.wait_until_ready()
        job.process.send_signal(signal.SIGTERM)
        assert job.end()[0] == 143
    assert job.num_told() == [1, 1]
    assert job.calls("scontrol", "requeue") == []


@pytest.mark.parametrize("code", [0, 143])
def test_a_notice_during_the_doctor_starts_no_training_and_is_requeued(tmp_path, code):
    with Job(tmp_path, make_spec(), doctor=f"wait:{code}") as job:
        job.wait_until_ready()
        job.process.send_signal(signal.SIGTERM)
        assert job.end()[0] == 143
    assert job.num_told() == [1, 1]
    assert job.calls("rankfold", "run") == []
    assert len(job.calls("scontrol", "requeue")) == 1


def test_the_legs_of_an_array_are_one_job_and_the_rest_goes_when_it_is_done(tmp_path):
    with Job(tmp_path, make_spec(**SPECS["legs"])) as job:
        assert job.end()[0] == 0
    (_, words, _), *_ = job.calls("rankfold", "run")
    assert words[words.index("--job") + 1] == "slurm-100"
    assert [words for _, words, _ in job.calls("scancel")] == [["--state=PENDING", "100"]]


def test_a_leg_that_is_told_to_end_leaves_the_rest_to_the_next_leg(tmp_path):
    with Job(tmp_path, make_spec(**SPECS["legs"]), train="wait:143") as job:
        job.wait_until_ready()
        job.process.send_signal(signal.SIGTERM)
        assert job.end()[0] == 143
    assert job.num_told() == [1, 1]
    assert job.calls("scontrol", "requeue") == []
    assert job.calls("scancel") == []
    assert [words for _, words, _ in job.calls("squeue")] == [["--noheader", "--format=%T", "--jobs=100_2"]]


def test_outside_of_slurm_the_script_says_how_it_is_started(tmp_path):
    script = tmp_path / "job.sbatch"
    script.write_text(render(make_spec(), Target.slurm))
    done = subprocess.run(["bash", script], capture_output=True, text=True, timeout=DEADLINE_S, env={"PATH": "/bin"})
    assert done.returncode != 0
    assert "submit this script with sbatch" in done.stderr
