"""The actor that merges under Ray is killed in mid-run: what it had acknowledged is in the record, and once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import nn

import telemetry
from aggregator import open_history
from aggregator.history import verify
from aggregator.ray_actor.library import INSTALL, load_ray
from aggregator.ray_actor.query import read_status
from launch.gates import Gate, Limit, Needs, NotRunError, Trial
from launch.gates.worker import from_rank, join_job, leave_job, on_all, write_result
from telemetry.errors import RankfoldError

GATE = Gate(
    name="ray-failover",
    purpose="an actor that is killed in mid-run comes back, loses no acknowledged packet and counts none twice",
    procedure=(
        "Ranks on all nodes send steps of known tensors to one actor of a Ray cluster, which is killed with SIGKILL "
        "three times in mid-run, each time once it is back. Every rank counts by itself what it fed; the sums over "
        "all ranks have to be in the record. RAY_ADDRESS names the cluster; a rehearsal starts one."
    ),
    needs=Needs(num_nodes=2, modules={"ray": INSTALL}),
    limits=(
        Limit("kills of the actor in mid-run", "at least", 3),
        Limit("restarts that the record knows of", "at least", 3),
        Limit("acknowledged steps that are not in the record once", "equal to", 0),
        Limit("counts that differ from those of the ranks", "equal to", 0),
        Limit("steps that some rank is missing from", "equal to", 0),
        Limit("packets that ranks had to drop", "equal to", 0),
        Limit("ranks whose telemetry ended early", "equal to", 0),
        Limit("damaged ranges of the record", "equal to", 0),
        Limit("longest time until the actor was back", "at most", 60, "s", on_gpu_only=True),
    ),
    rehearsal="the procedure in a Ray cluster of one node; not an actor that moves to another node",
    deadline_s=400.0,
)
KILLS, STEPS_BETWEEN, PACE_S, BACK_S = 3, 20, 0.1, 120.0
DEADLINES = telemetry.Deadlines(attach_s=120, merge_s=120, close_s=120)
COUNTS = ("total", "finite", "zero", "negative", "nan", "pos_inf", "neg_inf", "calls")


def run(trial: Trial) -> Mapping[str, object]:
    """Start the ranks, in the cluster that is there or in one of this gate's own."""
    with ray_cluster(trial) as address:
        # What is proven is on the CPU wherever this runs: packets come out of reductions that other gates prove.
        measured: dict[str, object] = trial.run_ranks([str(trial.out / "run")], env={"RAY_ADDRESS": address})
    return measured


@contextmanager
def ray_cluster(trial: Trial) -> Iterator[str]:
    """Yield the address of a cluster."""
    if address := os.environ.get("RAY_ADDRESS"):
        yield address
        return
    if trial.num_nodes > 1:
        raise NotRunError("RAY_ADDRESS is not set: start a Ray cluster on these nodes and name it")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = load_ray()
    options = {"include_dashboard": False, "object_store_memory": 150_000_000, "logging_level": "ERROR"}
    ray.init(address="local", num_cpus=2, log_to_driver=False, **options)
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


def train(out: Path, backend: str = "gloo") -> None:
    """Send steps until the actor was killed often enough and a little longer; every rank runs this."""
    join_job(backend, timeout_s=300.0)
    rank = dist.get_rank()
    to = f"ray://{from_rank(0, f'gate-{uuid4().hex[:12]}')}?dir={out.absolute()}"
    model = nn.Sequential(nn.Identity())
    session = telemetry.watch(model, to=to, signals=("activations",), every=1, deadlines=DEADLINES)
    killer = Killer(to)
    if rank == 0:
        killer.start()
    fed: list[list[int]] = []
    is_over = False
    while not is_over:
        is_over = from_rank(0, killer.is_over.is_set())
        for _ in range(STEPS_BETWEEN):
            batch = batch_of(rank, len(fed) + 1)
            with session.step(len(fed) + 1):
                model(batch)
            fed.append(counts_of(batch))
            # Slower where there are more ranks: all packets in flight together are bounded.
            time.sleep(PACE_S * max(1.0, dist.get_world_size() / 8))
    session.close()
    merge = session.report.merge
    reports = on_all(
        {"failure": str(merge.failure or ""), "dropped": merge.num_abstained, "partial": merge.num_partial}
    )
    expected = [[sum(counts) for counts in zip(*step, strict=True)] for step in zip(*on_all(fed), strict=True)]
    if rank == 0:
        write_result({**killer.account(), **account_of(reports), **compare(out, expected, merge.num_committed)})


def batch_of(rank: int, step: int) -> torch.Tensor:
    """Return what a rank feeds at a step: of another size and with other numbers than that of any neighbour."""
    values = torch.arange(-3.0, 4.0 + (3 * rank + 7 * step) % 11)
    values[0] = (float("nan"), float("inf"), float("-inf"))[(rank + step) % 3]
    return values.repeat(1 + (rank + step) % 3, 1)


def counts_of(batch: torch.Tensor) -> list[int]:
    """Count a batch without telemetry, in the order of ``COUNTS``."""
    found = (batch.isfinite(), batch == 0, batch < 0, batch.isnan(), batch == float("inf"), batch == float("-inf"))
    finite, zero, negative, nan, pos_inf, neg_inf = (int(one.sum()) for one in found)
    return [batch.numel(), finite, zero, negative - neg_inf, nan, pos_inf, neg_inf, 1]


class Killer(threading.Thread):
    """Kills the actor again and again, from rank zero, while all train."""

    def __init__(self, to: str) -> None:
        super().__init__(daemon=True)
        self.is_over = threading.Event()
        self._to, self._back_s, self._error = to, list[float](), ""

    def run(self) -> None:
        """Kill the actor, wait until it is back, and let it work for a moment."""
        try:
            for _ in range(KILLS):
                time.sleep(1.0)
                pid = self._kill()
                killed_at = time.monotonic()
                while self._pid() in (None, pid):
                    if time.monotonic() - killed_at > BACK_S:
                        raise TimeoutError(f"the actor was not back {BACK_S:g} s after it was killed")
                    time.sleep(0.1)
                self._back_s.append(time.monotonic() - killed_at)
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"
        self.is_over.set()

    def account(self) -> dict[str, Any]:
        """Return what was done."""
        return {
            "kills of the actor in mid-run": len(self._back_s),
            "longest time until the actor was back": max(self._back_s, default=None),
            "what stopped the killing": self._error,
        }

    def _kill(self) -> int:
        ray = load_ray()
        (status,) = read_status(self._to, timeout_s=60.0)
        (node,) = {one["NodeID"] for one in ray.nodes() if one["Alive"] and one["NodeManagerHostname"] == status.host}
        there = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        kill = ray.remote(kill_process).options(num_cpus=0, scheduling_strategy=there)
        ray.get(kill.remote(status.pid), timeout=BACK_S)
        return status.pid

    def _pid(self) -> int | None:
        try:
            return next((status.pid for status in read_status(self._to)), None)
        except RankfoldError:
            return None


def kill_process(pid: int) -> None:
    """Kill a process; runs on its node."""
    os.kill(pid, signal.SIGKILL)


def account_of(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the ranks were told at their close."""
    return {
        "ranks whose telemetry ended early": sum(bool(report["failure"]) for report in reports),
        "packets that ranks had to drop": max(report["dropped"] for report in reports),
        "steps that some rank is missing from": max(report["partial"] for report in reports),
        "what ranks said": [report["failure"] for report in reports if report["failure"]][:3],
    }


def compare(run: Path, expected: list[list[int]], num_acknowledged: int) -> dict[str, Any]:
    """Return how the record differs from what the ranks fed."""
    history = open_history(run)
    rows = history.observations(columns=["step", *COUNTS]).to_pylist()
    steps = sorted(row["step"] for row in rows)
    wrong = [row["step"] for row in rows if [row[name] for name in COUNTS] != expected[row["step"] - 1]]
    every = list(range(1, len(expected) + 1))
    return {
        "acknowledged steps that are not in the record once": sum(steps.count(step) != 1 for step in every)
        + abs(len(expected) - num_acknowledged),
        "counts that differ from those of the ranks": len(wrong),
        "restarts that the record knows of": history.segments().num_rows - 1,
        "damaged ranges of the record": verify(run).num_rows,
        "steps in the record": len(steps),
    }


if __name__ == "__main__":
    train(Path(sys.argv[1]))
    leave_job(together=False)
