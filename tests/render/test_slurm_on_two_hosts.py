"""The rendered script with the real ``rankfold`` on two hosts: told to end, requeued, and one run in the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aggregator import open_history
from launch.render import LaunchSpec, Target, render
from tests.hosts import two_hosts_or_skip
from tests.launch.started import SCRIPT, step_of
from tests.render import two_hosts_slurm

pytestmark = [pytest.mark.full, pytest.mark.timeout(500)]

DEADLINE_S = 180
STEPS = 12


@pytest.fixture
def hosts():
    with two_hosts_or_skip() as made:
        yield made


class Leg:
    """One start of the script by Slurm."""

    def __init__(self, out: Path, hosts, num_restarts: int) -> None:
        binaries = out / "bin"
        binaries.mkdir(exist_ok=True)
        for name in ("srun", "scontrol", "squeue"):
            program = binaries / name
            program.write_text(f"#!{sys.executable}\n{Path(two_hosts_slurm.__file__).read_text()}")
            program.chmod(0o755)
        words = ("--out", str(out), "--steps", str(STEPS), "--pause", "0.5", "--checkpoint", str(out / "checkpoint"))
        spec = LaunchSpec(
            "exp1", 2, str(out / "run"), SCRIPT, words, gpus_per_node=0, ranks_per_node=2, max_restarts=0, grace_s=20
        )
        (out / "job.sbatch").write_text(render(spec, Target.slurm))
        environ = {
            **os.environ,
            "PATH": f"{binaries}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "FAKES": str(out),
            "HOSTS": f"{hosts.first.name} {hosts.second.name}",
            "OMP_NUM_THREADS": "1",
            "SLURM_JOB_ID": "123",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "both",
            "SLURM_RESTART_COUNT": str(num_restarts),
        }
        self.log = out / f"leg-{num_restarts}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(["bash", out / "job.sbatch"], env=environ, stdout=log, stderr=log)

    def end(self) -> int:
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            pytest.fail(self.log.read_text(errors="replace")[-3000:])


def test_a_job_that_is_told_to_end_is_requeued_and_finishes_its_own_run(hosts, tmp_path):
    first = Leg(tmp_path, hosts, 0)
    ends = time.monotonic() + DEADLINE_S
    while step_of(tmp_path, 0) < 5:
        assert first.process.poll() is None, first.log.read_text()
        assert time.monotonic() < ends, first.log.read_text()
        time.sleep(0.1)
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == 128 + signal.SIGTERM, first.log.read_text()
    assert (tmp_path / "calls").read_text() == "requeue 123\n"
    assert "nodes: 2: " in first.log.read_text()
    committed = open_history(tmp_path / "run").steps()["step"].to_pylist()
    assert committed == list(range(1, len(committed) + 1))
    assert len(committed) >= 4
    second = Leg(tmp_path, hosts, 1)
    assert second.end() == 0, second.log.read_text()
    rows = open_history(tmp_path / "run").steps().select(["step", "num_ranks", "segment"]).to_pydict()
    assert rows["step"] == list(range(1, STEPS + 1))
    assert set(rows["num_ranks"]) == {4}
    assert set(rows["segment"]) == {0, 1}
