"""The link between two nodes fails: a short loss costs the record nothing, a final one ends in time on both sides."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import telemetry
from aggregator import open_history
from aggregator.history import verify
from launch.gates import Gate, Limit, Needs, NotRunError, Trial
from launch.gates.hosts import two_hosts
from launch.gates.loops import gather, longest_pause, tell
from launch.gates.trial import RanksFailedError
from launch.gates.worker import join_job, leave_job, write_result

CUT, MEND = "RANKFOLD_GATE_CUT_COMMAND", "RANKFOLD_GATE_MEND_COMMAND"
GATE = Gate(
    name="two-node-link-loss",
    purpose="a link that is cut for 6 s costs the record nothing; one that is cut for good ends telemetry in time, "
    "on both sides, and the record names the ranks beyond it",
    procedure=(
        "Ranks of two nodes train without a collective of their own and log a step each 1.2 s, with a deadline of 12 s "
        f"for a merge. The link is cut for 6 s, and at 24 s for good. {CUT} and {MEND} are shell commands that cut the "
        "first node off from all others and undo it, run on the first node; the storage has to stay in reach."
    ),
    needs=Needs(num_nodes=2),
    limits=(
        Limit("ranks that gave up in the short loss", "equal to", 0),
        Limit("steps before the final loss that are not in the record with all ranks", "equal to", 0),
        # Else nothing was lost: the first step that is logged in between has to wait for what is left of it.
        Limit("longest merge in the short loss", "at least", 4, "s"),
        Limit("ranks that did not give up after the final loss", "equal to", 0),
        Limit("ranks that named nobody on the other side", "equal to", 0),
        Limit("longest time until a rank gave up", "at most", 45, "s"),
        # Far below the deadline of a merge: a loop that waited for the other side could not make it.
        Limit("longest pause of a loop", "at most", 2.5, "s"),
        Limit("longest close of a rank", "at most", 15, "s"),
        Limit("ranks beyond the link that the record does not name", "equal to", 0),
        Limit("damaged ranges of the record", "equal to", 0),
    ),
    rehearsal="all of it between two network namespaces of this machine; not the network of the cluster",
    deadline_s=240.0,
)
DEADLINES = telemetry.Deadlines(attach_s=60, merge_s=12, close_s=10)
STEP_S, EVERY, STEPS_AFTERWARDS = 0.1, 12, 20
CUT_AT_S, MEND_AT_S, CUT_FOR_GOOD_AT_S, LOOP_S, END_S = 4.0, 10.0, 24.0, 80.0, 60.0
# The agents of torchrun take a node for dead after 15 s without a word, and would end what is to be measured.
PATIENT_AGENTS = ("--rdzv-conf", "keep_alive_max_attempt=60")


def run(trial: Trial) -> Mapping[str, object]:
    """Start the ranks on the nodes of the job, or on two hosts in this machine."""
    if trial.num_nodes == 1:
        return rehearse(trial)
    if CUT not in os.environ or MEND not in os.environ:
        raise NotRunError(f"set {CUT} and {MEND} to shell commands that cut the first node off and undo it")
    words = [str(trial.out), os.environ[CUT], os.environ[MEND]]
    measured: dict[str, object] = trial.run_ranks(words, options=PATIENT_AGENTS)
    return measured


def rehearse(trial: Trial) -> Mapping[str, object]:
    """Start two ranks on each of two hosts."""
    with two_hosts() as pair, (trial.out / "ranks.log").open("wb") as log:
        agents = []
        for node_rank, host in enumerate((pair.first, pair.second)):
            node = replace(trial, num_nodes=2, node_rank=node_rank, endpoint=f"{pair.first.name}:29400")
            command = node.command([str(trial.out), pair.cut_command, pair.mend_command], 2, options=PATIENT_AGENTS)
            agents.append(host.start(command, env=node.environment(), stdout=log, stderr=log))
        try:
            codes = [agent.wait(trial.remaining_s) for agent in agents]
        except subprocess.TimeoutExpired as error:
            raise RanksFailedError(f"the ranks were late, see {trial.out / 'ranks.log'}") from error
    if any(codes):
        raise RanksFailedError(f"torchrun ended with {codes} on the two hosts, see {trial.out / 'ranks.log'}")
    measured: dict[str, object] = trial.result()
    return measured


def train(out: Path, cut: str, mend: str) -> None:
    """Train through both losses and tell how it went; every rank runs this."""
    # What is cut carries packets of telemetry, which are merged in host memory, wherever the model is.
    join_job("gloo")
    link = Link(cut, mend)
    torch.manual_seed(0)
    session = telemetry.watch(
        model := nn.Linear(8, 8), to=out / "run", signals=("parameters",), every=EVERY, deadlines=DEADLINES
    )
    dist.barrier()
    if dist.get_rank() == 0:
        link.start()
    try:
        tell(out, dist.get_rank(), {"node": int(os.environ["GROUP_RANK"]), **loop(session, model)})
        if dist.get_rank() == 0:
            told = gather(out, dist.get_world_size(), END_S)
            write_result({**judge_ranks(told, link.cut_at), **read_record(out / "run", told, link.cut_at)})
    finally:
        link.close()


def loop(session: telemetry.Session, model: nn.Module) -> dict[str, Any]:
    """Train at a steady pace until telemetry has given up and a little longer; return when what happened."""
    begun, ends, failed_at, last = time.time(), list[float](), None, None
    while time.time() < begun + LOOP_S and (last is None or len(ends) < last):
        with session.step(len(ends) + 1):
            model(torch.ones(2, 8)).sum().backward()
        # By the clock, so that ranks without a collective stay together.
        time.sleep(max(0.0, begun + STEP_S * (len(ends) + 1) - time.time()))
        ends.append(time.time())
        if failed_at is None and session.failure is not None:
            failed_at, last = time.time(), len(ends) + STEPS_AFTERWARDS
    closing = time.time()
    session.close()
    return {
        "ends": ends,
        "failed_at": failed_at,
        "failure": str(session.failure),
        "missing": list(session.report.merge.missing_ranks),
        "close_s": time.time() - closing,
    }


class Link(threading.Thread):
    """Cuts and mends at its times, from rank zero.

    Attributes:
        cut_at: time of day of the final loss.
    """

    def __init__(self, cut: str, mend: str) -> None:
        super().__init__(daemon=True)
        self.cut_at = float("inf")
        self._cut, self._mend = cut, mend

    def run(self) -> None:
        """Lose the link for a moment, and then for good."""
        begun = time.time()
        for at_s, command in ((CUT_AT_S, self._cut), (MEND_AT_S, self._mend), (CUT_FOR_GOOD_AT_S, self._cut)):
            time.sleep(max(0.0, begun + at_s - time.time()))
            subprocess.run(command, shell=True, check=True, timeout=10)
        self.cut_at = time.time()

    def close(self) -> None:
        """Mend, so that torchrun can end on both sides."""
        if self.ident is not None:
            self.join(LOOP_S)
            subprocess.run(self._mend, shell=True, check=True, timeout=10)


def judge_ranks(told: Mapping[int, Any], cut_at: float) -> dict[str, Any]:
    """Return the measured quantities of the loops; ``cut_at`` is that of the final loss."""
    nodes = {rank: one["node"] for rank, one in told.items()}
    gave_up = [one["failed_at"] for one in told.values() if one["failed_at"] is not None]
    late = [at - cut_at for at in gave_up if at >= cut_at]
    return {
        "ranks that gave up in the short loss": len(gave_up) - len(late),
        "ranks that did not give up after the final loss": len(told) - len(late),
        "longest time until a rank gave up": max(late, default=None),
        "ranks that named nobody on the other side": sum(
            not any((nodes[missing] == 0) != (one["node"] == 0) for missing in one["missing"]) for one in told.values()
        ),
        "longest pause of a loop": max(longest_pause(one["ends"]) for one in told.values()),
        "longest close of a rank": max(one["close_s"] for one in told.values()),
        "what ranks said": {rank: one["failure"] for rank, one in told.items()},
    }


def read_record(run: Path, told: Mapping[int, Any], cut_at: float) -> dict[str, Any]:
    """Return what the record says of the steps before the final loss, and of the one that it ended."""
    coverage = {row["step"]: row for row in open_history(run).coverage().to_pylist()}
    # A step that ended on all ranks a deadline's grace before the loss had the time to get through.
    made = min(sum(end < cut_at - 1.5 for end in one["ends"]) for one in told.values())
    beyond = {rank for rank, one in told.items() if one["node"] != 0}
    last = coverage[max(coverage)]
    waits = [row["merge_s"] for row in open_history(run).steps().to_pylist() if row["step"] <= made]
    return {
        "steps before the final loss that are not in the record with all ranks": sum(
            step not in coverage or bool(coverage[step]["missing_ranks"]) for step in range(EVERY, made + 1, EVERY)
        ),
        "longest merge in the short loss": max(waits, default=None),
        "ranks beyond the link that the record does not name": len(beyond - set(last["missing_ranks"])),
        "damaged ranges of the record": verify(run).num_rows,
        "steps in the record": sorted(coverage),
    }


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
    leave_job(together=False)
