"""A rank that stops in mid-run is named within the deadlines, and no other rank's training waits for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import telemetry
from aggregator import open_history
from aggregator.history import verify
from launch.gates import Gate, Limit, Needs, Trial
from launch.gates.loops import gather, longest_pause, tell
from launch.gates.worker import join_job, leave_job, write_result

GATE = Gate(
    name="hang-proofing",
    purpose="a rank that hangs is named within the deadlines, the others train on without a pause, the record reads",
    procedure=(
        "All ranks train without a collective of their own, with a deadline of 5 s for a merge. At step 10 one rank is "
        "stopped with SIGSTOP and stays so until every other rank has given up telemetry, trained on and closed; then "
        "it goes on to its end. Done with the last rank, and then in a new record with rank zero, which writes it."
    ),
    needs=Needs(gpus_per_node=2),
    limits=(
        Limit("other ranks that did not name the stopped rank", "equal to", 0),
        Limit("other ranks that did not give up", "equal to", 0),
        Limit("longest time until another rank gave up", "at most", 30, "s"),
        # Far below the deadline of a merge: a loop that waited for the stopped rank could not make it.
        Limit("longest pause of another rank's loop", "at most", 2.5, "s"),
        Limit("fewest steps another rank made after the stop", "at least", 20),
        Limit("longest close of another rank", "at most", 15, "s"),
        Limit("steps that left every rank and are not in the record", "equal to", 0),
        Limit("damaged ranges of the records", "equal to", 0),
        Limit("records of rank zero that do not name the stopped rank", "equal to", 0),
    ),
    rehearsal="the deadlines, the record and the account on the CPU; not that streams of a GPU go on",
    deadline_s=180.0,
)
DEADLINES = telemetry.Deadlines(attach_s=60, merge_s=5, close_s=10)
STOP_AT, STEPS_AFTERWARDS, LOOP_S, END_S = 10, 25, 40.0, 50.0
# Continues the stopped rank once all others have told how they ended, or when the gate is over anyway.
CONTINUE = 'i=0; while [ $i -lt 900 ] && [ $(ls "$1" | grep -c "rank-.*json$") -lt $2 ]; do sleep 0.1; i=$((i+1)); done'


def run(trial: Trial) -> Mapping[str, object]:
    """Start the ranks and return the worse of both stops."""
    # More than one other rank, where ranks need no GPU of their own.
    num_ranks = max(3, trial.num_ranks) if trial.is_rehearsal else trial.num_ranks
    words = ["--out", str(trial.out), "--backend", trial.backend]
    stops = trial.run_ranks(words, num_ranks=num_ranks)["stops"]
    fewest = "fewest steps another rank made after the stop"
    worst = {limit.name: max((stop[limit.name] for stop in stops), key=as_bad) for limit in GATE.limits}
    return {**worst, fewest: min(stop[fewest] for stop in stops), "stops": stops}


def as_bad(value: float | None) -> float:
    """Order measured values; one that is missing is the worst."""
    return float("inf") if value is None else value


def train(out: Path, backend: str) -> None:
    """Train past a stop of the last rank, then past one of rank zero; every rank runs this."""
    device = join_job(backend)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    stops = []
    for victim in (world_size - 1, 0):
        folder = out / f"rank-{victim}-stops"
        folder.mkdir(exist_ok=True)
        tell(folder, rank, loop(folder, device, victim))
        if rank == 0:
            told = gather(folder, world_size, END_S)
            stops.append({**judge_ranks(told, victim), **read_record(folder / "run", victim)})
        dist.barrier()
    write_result({"stops": stops})


def loop(folder: Path, device: torch.device, victim: int) -> dict[str, Any]:
    """Train until telemetry has given up and a little longer; return when what happened."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).to(device)
    session = telemetry.watch(
        model, to=folder / "run", signals=("parameters", "gradients"), every=1, deadlines=DEADLINES
    )
    ends: list[float] = []
    stopped_at = failed_at = None
    last, ends_at = None, time.time() + LOOP_S
    while time.time() < ends_at and (last is None or len(ends) < last):
        with session.step(len(ends) + 1):
            model(torch.ones(4, 64, device=device)).sum().backward()
        time.sleep(0.02)
        ends.append(time.time())
        if len(ends) == STOP_AT and dist.get_rank() == victim:
            stopped_at = stop_until_continued(folder)
        if failed_at is None and session.failure is not None:
            failed_at, last = time.time(), len(ends) + STEPS_AFTERWARDS
    begun = time.time()
    session.close()
    return {
        "ends": ends,
        "stopped_at": stopped_at,
        "failed_at": failed_at,
        "failure": str(session.failure),
        "missing": list(session.report.merge.missing_ranks),
        "close_s": time.time() - begun,
    }


def stop_until_continued(folder: Path) -> float:
    """Stop this process; returns the time at which it did."""
    # Its last steps have to leave it first, however busy the machine is.
    time.sleep(2)
    words = ["sh", "-c", f'{CONTINUE}; kill -CONT "$3"', "sh", str(folder), str(dist.get_world_size() - 1)]
    subprocess.Popen([*words, str(os.getpid())], start_new_session=True)
    stopped_at = time.time()
    os.kill(os.getpid(), signal.SIGSTOP)
    return stopped_at


def judge_ranks(told: Mapping[int, Any], victim: int) -> dict[str, Any]:
    """Return the measured quantities of the loops."""
    others = [one for rank, one in told.items() if rank != victim]
    gave_up = [one["failed_at"] for one in others if one["failed_at"] is not None]
    stopped_at = told[victim]["stopped_at"]
    return {
        "other ranks that did not name the stopped rank": sum(victim not in one["missing"] for one in others),
        "other ranks that did not give up": sum(one["failed_at"] is None for one in others),
        "longest time until another rank gave up": max((at - stopped_at for at in gave_up), default=None),
        "longest pause of another rank's loop": max(longest_pause(one["ends"]) for one in others),
        "fewest steps another rank made after the stop": min(
            sum(end > stopped_at for end in one["ends"]) for one in others
        ),
        "longest close of another rank": max(one["close_s"] for one in others),
        "what another rank said": others[0]["failure"],
    }


def read_record(run: Path, victim: int) -> dict[str, Any]:
    """Return what the record gives away; it has to hold what every rank had sent before the stop."""
    coverage = open_history(run).coverage().to_pylist()
    steps = [row["step"] for row in coverage]
    complete = sum(not row["missing_ranks"] for row in coverage)
    # Rank zero, once it goes on, knows only that the others gave up: it need not name itself.
    is_named = victim == 0 or victim in coverage[-1]["missing_ranks"]
    return {
        "steps that left every rank and are not in the record": max(0, STOP_AT - complete)
        + (steps != list(range(1, len(steps) + 1))),
        "damaged ranges of the records": verify(run).num_rows,
        "records of rank zero that do not name the stopped rank": int(not is_named),
        "steps in the record": len(steps),
    }


if __name__ == "__main__":
    options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    train(Path(options["--out"]), options["--backend"])
    leave_job(together=False)
