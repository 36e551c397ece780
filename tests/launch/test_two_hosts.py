"""``rankfold run`` on two hosts with two ranks each: one run, one writer, and what a link does that is cut."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from aggregator import open_history
from launch.gates.hosts import Host, TwoHosts
from tests.launch.started import RANKFOLD, SCRIPT, step_of, told

pytestmark = pytest.mark.timeout(400)

DEADLINE_S = 240.0
RANKS, WIDTH = 4, 4


class Started:
    """The launchers of both hosts."""

    def __init__(self, hosts: TwoHosts, out: Path, *script: str) -> None:
        self.out = out
        self.jobs = [self._start(host, hosts.first, script) for host in (hosts.first, hosts.second)]
        self.ends = time.monotonic() + DEADLINE_S

    def _start(self, host: Host, meeting_place: Host, script: tuple[str, ...]) -> subprocess.Popen[bytes]:
        options = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-endpoint", f"{meeting_place.name}:29400"]
        words = [RANKFOLD, "run", "--to", str(self.out / "run"), "--grace-s", "5", "--threads", "1", *options]
        log = (self.out / f"{host.name[-1]}.log").open("wb")
        return host.start([*words, "--", SCRIPT, "--out", str(self.out), *script], stdout=log, stderr=log)

    def wait_for_step(self, step: int) -> None:
        while min(step_of(self.out, rank) for rank in range(RANKS)) < step:
            assert all(job.poll() is None for job in self.jobs), self.logs()
            assert time.monotonic() < self.ends, self.logs()
            time.sleep(0.05)

    def finish(self) -> list[int]:
        for job in self.jobs:
            try:
                job.wait(max(0.1, self.ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                pytest.fail(f"a launcher did not end\n{self.logs()}")
        return [job.returncode for job in self.jobs]

    def logs(self) -> str:
        return "\n".join(file.read_text(errors="replace")[-3000:] for file in sorted(self.out.glob("?.log")))


def test_four_ranks_on_two_hosts_are_one_run_with_one_writer_that_merges_exactly(hosts, tmp_path):
    job = Started(hosts, tmp_path, "--steps", "6")
    assert job.finish() == [0, 0], job.logs()
    history = open_history(tmp_path / "run")
    assert history.steps().select(["step", "num_ranks"]).to_pydict() == {
        "step": list(range(1, 7)),
        "num_ranks": [4] * 6,
    }
    # Every rank puts a batch of 2 × 4 through the layer: its own number, plus that of the step.
    totals = history.series("0", "activation", "total")["value"].to_pylist()
    assert totals == [RANKS * 2 * WIDTH] * 6
    assert history.series("0.weight", "parameter", "total")["value"].to_pylist() == [WIDTH * WIDTH] * 6
    environments = told(tmp_path)
    assert sorted(environments) == [(0, rank) for rank in range(RANKS)]
    assert all(env == environments[0, 0] for env in environments.values())
    assert [path.name for path in (tmp_path / "run").glob("seg-*")] == ["seg-00000"]


def test_a_link_that_is_cut_for_six_seconds_costs_time_and_no_step(hosts, tmp_path):
    job = Started(hosts, tmp_path, "--steps", "25", "--pause", "0.1")
    job.wait_for_step(4)
    hosts.cut()
    time.sleep(6.0)
    at = step_of(tmp_path, 0)
    hosts.mend()
    assert job.finish() == [0, 0], job.logs()
    assert at < 25
    history = open_history(tmp_path / "run")
    rows = history.steps().select(["step", "num_ranks", "segment"]).to_pydict()
    assert rows == {"step": list(range(1, 26)), "num_ranks": [4] * 25, "segment": [0] * 25}


def cut_for_good(hosts: TwoHosts, out: Path, *script: str) -> Started:
    job = Started(hosts, out, "--steps", "100000", "--pause", "0.1", "--group-s", "12", "--merge-s", "8", *script)
    job.wait_for_step(4)
    hosts.cut()
    return job


def readable_steps(run: Path) -> list[int]:
    steps = open_history(run).steps()["step"].to_pylist()
    assert steps == list(range(1, len(steps) + 1))
    return steps


def test_a_link_that_stays_cut_ends_training_and_both_launchers_and_every_step_of_before_reads(hosts, tmp_path):
    job = cut_for_good(hosts, tmp_path)
    done = step_of(tmp_path, 0)
    assert job.finish() == [1, 1], job.logs()
    assert "Timed out waiting 12000ms" in job.logs()
    assert len(readable_steps(tmp_path / "run")) >= done - 1


def test_behind_a_link_that_stays_cut_training_of_its_own_goes_on_and_the_record_names_who_is_missing(hosts, tmp_path):
    job = cut_for_good(hosts, tmp_path, "--alone")
    # Nothing keeps these ranks together: what all of them had made counts.
    at = min(step_of(tmp_path, rank) for rank in range(RANKS))
    wait_until = time.monotonic() + 100
    while not missing_ranks(tmp_path / "run"):
        assert time.monotonic() < wait_until, job.logs()
        time.sleep(0.5)
    assert step_of(tmp_path, 0) > at
    for launcher in job.jobs:
        assert launcher.poll() is None, job.logs()
        launcher.terminate()
    # Each ends although the other cannot be told.
    assert job.finish() == [128 + signal.SIGTERM] * 2, job.logs()
    assert missing_ranks(tmp_path / "run") == {2, 3}
    assert len(readable_steps(tmp_path / "run")) >= at - 1


def missing_ranks(run: Path) -> set[int]:
    return {rank for row in open_history(run).coverage().to_pylist() for rank in row["missing_ranks"]}
