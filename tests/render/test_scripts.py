"""The rendered script is sound bash, whatever the job."""

import os
import shutil
import subprocess

import pytest

from launch.render import Target, render
from tests.render.specs import NODES, SPECS, make_spec

DEADLINE_S = 60
# Words of the user stand in single quotes, and what looks like an expansion or an escape in them is meant as it is.
MEANT = "SC1003,SC2016"


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts")
    paths = []
    for num_nodes in NODES:
        for name, changes in SPECS.items():
            path = folder / f"{name}-{num_nodes}.sbatch"
            path.write_text(render(make_spec(num_nodes, **changes), Target.slurm))
            paths.append(path)
    return paths


def test_bash_reads_it(scripts):
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True, timeout=DEADLINE_S)


@pytest.mark.skipif(
    shutil.which("shellcheck") is None and not os.environ.get("REQUIRE_SHELLCHECK"), reason="needs shellcheck"
)
def test_shellcheck_finds_nothing(scripts):
    done = subprocess.run(
        ["shellcheck", "--shell=bash", f"--exclude={MEANT}", *scripts],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert (done.returncode, done.stdout) == (0, "")


def options_of(script):
    """Return the lines that sbatch reads: it stops at the first command."""
    found = []
    for line in script.splitlines():
        if line.startswith("#SBATCH "):
            found.append(line.removeprefix("#SBATCH "))
        elif line and not line.startswith("#"):
            break
    return found


def test_sbatch_is_asked_for_what_the_spec_says():
    assert options_of(render(make_spec(64, **SPECS["full"]), Target.slurm)) == [
        "--job-name=exp1",
        "--nodes=64",
        "--ntasks-per-node=1",
        "--gpus-per-node=4",
        "--cpus-per-task=48",
        "--mem=256G",
        "--time=1440",
        "--partition=gpu-long",
        "--account=team_1",
        "--qos=high",
        "--output=%x-%j.log",
        "--open-mode=append",
        "--requeue",
        "--signal=B:TERM@90",
    ]


def test_what_is_left_to_the_cluster_is_not_asked_for():
    assert options_of(render(make_spec(1, gpus_per_node=0), Target.slurm)) == [
        "--job-name=exp1",
        "--nodes=1",
        "--ntasks-per-node=1",
        "--output=%x-%j.log",
        "--open-mode=append",
        "--requeue",
        "--signal=B:TERM@90",
    ]


def test_legs_run_one_at_a_time_and_write_one_log():
    options = options_of(render(make_spec(**SPECS["legs"]), Target.slurm))
    assert {"--array=1-5%1", "--output=%x-%A.log"} <= set(options)
