"""What ``rankfold run`` starts, seen without starting it."""

from __future__ import annotations

import os

import pytest
from typer.testing import CliRunner

from launch.cli import app
from launch.job import plan_job
from telemetry.errors import ConfigurationError


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.touch()
    return str(path)


def options_of(job) -> dict[str, str]:
    words = list(job.command)
    return {word: words[index + 1] for index, word in enumerate(words[:-1]) if word.startswith("--")}


def test_one_node_meets_itself_whatever_its_name_resolves_to(script):
    found = options_of(plan_job(["--nproc-per-node", "2"], [script], environ={}))
    assert found["--rdzv-backend"] == "rankfold"
    assert found["--rdzv-endpoint"] == "localhost:0"
    assert found["--local-addr"] == "localhost"
    assert found["--nproc-per-node"] == "2"


def test_two_jobs_on_one_host_never_meet_each_other(script):
    ids = {options_of(plan_job([], [script], environ={}))["--rdzv-id"] for _ in range(2)}
    assert len(ids) == 2


def test_what_comes_after_the_script_is_left_alone(script):
    job = plan_job(["--max-restarts=3"], [script, "--nnodes", "7", "--to", "x"], environ={})
    assert list(job.command)[-5:] == [script, "--nnodes", "7", "--to", "x"]
    assert "--max-restarts=3" in job.command


@pytest.mark.parametrize(
    ("options", "environ", "endpoint"),
    [
        (["--nnodes", "2", "--rdzv-endpoint", "a:1"], {}, None),
        (["--nnodes=2", "--rdzv_endpoint=a:1"], {}, None),
        (["--nnodes", "2", "--master-addr", "a", "--master-port", "5"], {}, "a:5"),
        (["--nnodes", "2", "--master_addr=a"], {}, "a:29500"),
        ([], {"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "a:1"}, None),
        ([], {"PET_NNODES": "2", "PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "6"}, "a:6"),
    ],
)
def test_several_nodes_meet_where_the_user_says_in_any_spelling(options, environ, endpoint, script):
    job = plan_job(options, [script], environ=environ)
    own = list(job.command)[1 + len(options) : -1]
    expected = ["--rdzv-backend", "rankfold"] + (["--rdzv-endpoint", endpoint] if endpoint else [])
    assert own == expected


def test_several_nodes_without_a_place_to_meet_are_refused(script):
    with pytest.raises(ConfigurationError, match="no place where they meet"):
        plan_job(["--nnodes", "2"], [script], environ={})


def test_several_nodes_of_a_named_job_do_not_meet_those_of_another(script):
    options = ["--nnodes", "2", "--rdzv-endpoint", "a:1"]
    assert options_of(plan_job(options, [script], job="exp1", environ={}))["--rdzv-id"] == "exp1"
    assert "--rdzv-id" not in options_of(plan_job([*options, "--rdzv-id=x"], [script], job="exp1", environ={}))


@pytest.mark.parametrize("environ", [{"PET_RDZV_BACKEND": "c10d"}, {}])
def test_torchruns_own_rendezvous_becomes_ours_which_does_the_same_and_more(environ, script):
    options = [] if environ else ["--rdzv-backend", "c10d"]
    words = list(plan_job(options, [script], environ=environ).command)
    assert words[len(words) - 1 - words[::-1].index("--rdzv-backend") + 1] == "rankfold"


@pytest.mark.parametrize("backend", ["static", "etcd-v2"])
def test_a_rendezvous_of_another_kind_is_left_as_it_is(backend, script):
    options = ["--rdzv-backend", backend, "--nnodes", "2"]
    assert list(plan_job(options, [script], environ={}).command)[1:] == [*options, script]


@pytest.mark.parametrize(
    ("words", "named"), [([], "no script"), (["nothing.py"], "nothing.py")], ids=["none", "missing"]
)
def test_a_script_that_is_not_there_is_refused_before_anything_starts(words, named):
    with pytest.raises(ConfigurationError, match=named):
        plan_job([], words, environ={})


def test_a_module_needs_no_file():
    words = list(plan_job(["-m"], ["package.train"], environ={}).command)
    assert (words[1], words[-1]) == ("-m", "package.train")


@pytest.mark.parametrize(
    ("options", "environ", "num_threads", "expected"),
    [
        (["--nproc-per-node", "1000"], {}, None, "1"),
        ([], {}, None, str(len(os.sched_getaffinity(0)))),
        ([], {"OMP_NUM_THREADS": "3"}, None, None),
        ([], {"OMP_NUM_THREADS": "3"}, 5, "5"),
    ],
    ids=["shared cores", "all cores", "from the environment", "asked for"],
)
def test_ranks_share_the_cores_unless_the_user_says_otherwise(options, environ, num_threads, expected, script):
    job = plan_job(options, [script], environ=environ, num_threads=num_threads)
    assert job.changes.get("OMP_NUM_THREADS") == expected


@pytest.mark.parametrize(
    ("options", "grace_s", "expected"), [([], 12.5, "13"), (["--shutdown-timeout", "5"], 12.5, None), ([], None, None)]
)
def test_torchrun_leaves_ranks_as_long_as_the_user_says(options, grace_s, expected, script):
    job = plan_job(options, [script], grace_s=grace_s, environ={})
    assert job.changes.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") == expected


@pytest.mark.parametrize(
    ("given", "environ", "expected"),
    [("exp1", {"SLURM_JOB_ID": "7"}, "exp1"), ("", {"SLURM_JOB_ID": "7"}, "slurm-7"), ("", {}, None)],
)
def test_the_job_is_named_by_the_user_or_by_slurm_or_by_the_nodes_themselves(given, environ, expected, script):
    job = plan_job([], [script], job=given, environ=environ)
    assert job.changes.get("RANKFOLD_JOB") == expected


def test_a_dry_run_prints_what_a_shell_could_run_and_starts_nothing(script):
    words = ["run", "--to", "runs/a b", "--nproc-per-node", "2", "--dry-run", "--", script, "--name", "it's"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0
    assert "export RANKFOLD_TO='runs/a b'" in shown.stdout
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in shown.stdout
    assert " --nproc-per-node 2 --rdzv-backend rankfold " in shown.stdout.splitlines()[-1]
    assert shown.stdout.splitlines()[-1].endswith(f" {script} --name 'it'\"'\"'s'")
