"""``rankfold render``: what it prints and writes, and how it refuses."""

import sys

import pytest

from launch.cli import run
from launch.render import Target, render
from tests.render.specs import make_spec

WORDS = ("--nodes", "2", "--to", "/shared/runs/exp1")
ON_KUBERNETES = ("--image", "registry.example/team/train:1", "--claim", "shared-data")
COMMAND = ("--", "train.py", "--lr", "1e-3")


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("slurm", "exp1.sbatch"),
        ("pytorchjob", "exp1.pytorchjob.yaml"),
        ("rayjob", "exp1.rayjob.yaml"),
        ("job", "exp1.job.yaml"),
        ("image", "Dockerfile"),
    ],
)
def test_it_writes_one_file_and_prints_its_path(target, name, tmp_path, capsys):
    folder = tmp_path / "new/folder"
    assert run(["render", target, *WORDS, *ON_KUBERNETES, "--out", str(folder), *COMMAND]) == 0
    assert capsys.readouterr().out == f"{folder / name}\n"
    assert [path.name for path in folder.iterdir()] == [name]
    assert (folder / name).read_text() == render(make_spec(2), Target(target))


@pytest.mark.parametrize("how", [["--dry-run"], ["--out", "-"]])
def test_it_prints_instead(how, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["render", "slurm", *WORDS, *ON_KUBERNETES, *how, *COMMAND]) == 0
    assert capsys.readouterr().out == render(make_spec(2), Target.slurm)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_is_named_and_kept_unless_forced(tmp_path, capsys):
    theirs = tmp_path / "exp1.sbatch"
    theirs.write_text("edited")
    words = ["render", "slurm", *WORDS, "--out", str(tmp_path)]
    assert run([*words, *COMMAND]) == 1
    refused = capsys.readouterr().err
    assert refused.startswith("[configuration_invalid] ")
    assert str(theirs) in refused.replace("\n", "")
    assert theirs.read_text() == "edited"
    assert run([*words, "--force", *COMMAND]) == 0
    assert theirs.read_text().startswith("#!/bin/bash\n")


def test_every_option_reaches_the_spec(capsys):
    options = {
        "--name": "exp2",
        "--gpus-per-node": "0",
        "--ranks-per-node": "4",
        "--cpus-per-node": "48",
        "--memory-gib": "256",
        "--time-limit-min": "60",
        "--grace-s": "20",
        "--max-restarts": "1",
        "--max-requeues": "2",
        "--port": "30000",
        "--network-interface": "eth0",
        "--env": "A=b=c",
        "--partition": "gpu",
        "--account": "team",
        "--qos": "high",
        "--legs": "4",
        "--mount-path": "/shared/runs",
        "--namespace": "team",
        "--shm-gib": "8",
        "--rdma": "rdma/ib=8",
    }
    words = [word for pair in options.items() for word in pair]
    spec = make_spec(
        2,
        name="exp2",
        gpus_per_node=0,
        ranks_per_node=4,
        cpus_per_node=48,
        memory_gib=256,
        time_limit_min=60,
        grace_s=20,
        max_restarts=1,
        max_requeues=2,
        port=30000,
        network_interface="eth0",
        env={"A": "b=c"},
        partition="gpu",
        account="team",
        qos="high",
        num_legs=4,
        mount_path="/shared/runs",
        namespace="team",
        shm_gib=8,
        rdma_resource="rdma/ib",
        rdma_count=8,
    )
    for target in Target:
        assert run(["render", target.value, *WORDS, *ON_KUBERNETES, *words, "--dry-run", *COMMAND]) == 0
        assert capsys.readouterr().out == render(spec, target)


def test_options_of_the_script_stay_its_own(capsys):
    assert run(["render", "slurm", *WORDS, "--dry-run", "--", "train.py", "--nodes", "9", "--", "--force"]) == 0
    assert "-- train.py --nodes 9 -- --force\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["render", "pbs", *WORDS, *COMMAND], "pbs"),
        (["render", "slurm", *WORDS], "SCRIPT"),
        (["render", "slurm", "--to", "/shared/x", *COMMAND], "--nodes"),
        (["render", "slurm", *WORDS, "--env", "A", *COMMAND], "--env is 'A'"),
        (["render", "job", *WORDS, "--rdma", "rdma/ib=x", *COMMAND], "count 'x'"),
    ],
)
def test_wrong_usage_exits_2_and_names_the_culprit(words, named, capsys):
    assert run(words) == 2
    assert named in capsys.readouterr().err


def test_a_name_that_the_run_directory_does_not_give_is_asked_for(capsys):
    assert run(["render", "slurm", "--nodes", "1", "--to", "/shared/runs/Exp_1", *COMMAND]) == 1
    assert "name is 'Exp_1'" in capsys.readouterr().err


def test_without_jinja_the_install_command_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert run(["render", "slurm", *WORDS, "--dry-run", *COMMAND]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("[render_unavailable]")
    assert "pip install 'rankfold[cluster]'" in printed
