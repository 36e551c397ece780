"""The storage of the run keeps its promises between hosts: one writer, nothing acknowledged lost, no torn reads."""

from __future__ import annotations

import random
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist

from aggregator.history import HistoryWriter, verify
from launch.checks import sync_seconds
from launch.gates import Gate, Limit, Needs, Trial
from launch.gates.children import Child, Tell, load_once
from launch.gates.known_run import Seen, commit_known, examine
from launch.gates.worker import from_rank, join_job, leave_job, on_all, write_result
from telemetry.summary import DEFAULT_DESCRIPTOR

GATE = Gate(
    name="shared-file-system",
    purpose="on storage that nodes share one writer wins, nothing acknowledged is lost, and readers see whole states",
    procedure=(
        "One process a node directs writers and readers on all nodes, in a folder that they share. Processes of all "
        "nodes begin a run in one directory at once. A writer continues the run of another node's, which still "
        "writes. Writers are killed with SIGKILL at random moments, each continued on the next node. 16 readers on "
        "all nodes read a run while it is written."
    ),
    needs=Needs(num_nodes=2),
    limits=(
        Limit("races that not exactly one process won", "equal to", 0),
        Limit("losers that were not refused by name", "equal to", 0),
        Limit("older writers that were not fenced by name", "equal to", 0),
        Limit("kills in mid-run", "at least", 20),
        Limit("kills after which an acknowledged step was missing", "equal to", 0),
        Limit("records with a step or a number that is wrong", "equal to", 0),
        Limit("damaged ranges of the records", "equal to", 0),
        Limit("reads while a run was written", "at least", 100),
        Limit("torn states that readers saw", "equal to", 0),
        # What NFS clients keep of a folder's listing by default.
        Limit("longest lag of a reader", "at most", 60, "s"),
        Limit("median sync of a file", "at most", 0.1, "s", on_gpu_only=True),
    ),
    rehearsal="the procedure between processes of one machine on its own disk; not the storage that nodes share",
    deadline_s=300.0,
)
RACES, PER_NODE, FENCES, KILLS, READERS, LIVE_S, LAG_S, FENCED_S = 5, 3, 4, 20, 16, 6.0, 90.0, 15.0


def run(trial: Trial) -> Mapping[str, object]:
    """Start one director a node, two in a rehearsal."""
    num_ranks = 1 if trial.num_nodes > 1 else 2
    measured: dict[str, object] = trial.run_ranks([str(trial.out)], num_ranks=num_ranks)
    return measured


def direct(out: Path) -> None:
    """Go through the stages together; every director runs this."""
    join_job("gloo", timeout_s=240.0)
    begin()
    stages = {**race(out / "race"), **fence(out / "fence"), **kill(out / "kill"), **read_live(out / "live")}
    syncs = on_all(sync_seconds(out))
    runs = [out / "fence", out / "kill", out / "live"]
    problems = list(chain.from_iterable(on_all([problem for run in runs for problem in examine(run).problems])))
    write_result(
        {
            **stages,
            "records with a step or a number that is wrong": len(problems),
            "damaged ranges of the records": sum(verify(run).num_rows for run in runs),
            "median sync of a file": max(syncs),
            "problems": problems[:5],
        }
    )


def begin() -> None:
    """Load what children need; the first one waits for it."""
    load_once("launch.checks", "launch.gates.known_run", "launch.gates.worker")
    Child(say_nothing).hear_all(within_s=120.0)


def say_nothing(_: Tell) -> None:
    """End at once."""


# Two jobs in one directory at once.


def race(folder: Path) -> dict[str, Any]:
    """Let processes of all nodes begin a run in one directory at the same moment."""
    outcomes = []
    for number in range(RACES):
        # All have to be there before the clock that they wait for.
        at = max(on_all(time.time() + 1.0))
        racers = [Child(begin_at, folder / str(number), at) for _ in range(PER_NODE)]
        told = [racer.hear_all() for racer in racers]
        outcomes.append(list(chain.from_iterable(chain.from_iterable(on_all(told)))))
    wins = [sum(one == "began" for one in outcome) for outcome in outcomes]
    refusals = sum(outcome.count("run_directory_in_use") for outcome in outcomes)
    return {
        "races that not exactly one process won": sum(num != 1 for num in wins),
        "losers that were not refused by name": RACES * PER_NODE * dist.get_world_size() - sum(wins) - refusals,
    }


def begin_at(run: Path, at: float, tell: Tell) -> None:
    """Begin a run at a time of day."""
    time.sleep(max(0.0, at - time.time()))
    HistoryWriter.create(run, {}, DEFAULT_DESCRIPTOR).close()
    tell("began")


# A writer that is continued while it still writes.


def fence(run: Path) -> dict[str, Any]:
    """Continue, on the next node, a run whose writer still writes; in turn on all nodes."""
    rank, world_size, first, ends = dist.get_rank(), dist.get_world_size(), 0, []
    for number in range(FENCES):
        older, newer = number % world_size, (number + 1) % world_size
        writer = Child(commit_known, run, first or None, 10**6) if rank == older else None
        acknowledged = [writer.hear() for _ in range(4)] if writer is not None else []
        resume = from_rank(older, writer and last_acknowledged(acknowledged) + 1)
        told = Child(commit_known, run, resume, 6).hear_all() if rank == newer else []
        last = from_rank(newer, rank == newer and last_acknowledged(told))
        ends.append(from_rank(older, writer.hear_all(FENCED_S)[-1] if writer is not None else None))
        first = last + 1
    return {"older writers that were not fenced by name": sum(end != "writer_fenced" for end in ends)}


def last_acknowledged(told: Sequence[Any]) -> int:
    """Return the newest step that a writer said was durable.

    Raises:
        RuntimeError: it was refused instead.
    """
    refusals = [one for one in told if isinstance(one, str)]
    if refusals or not told:
        raise RuntimeError(f"a writer that should have gone on told {refusals or 'nothing'}")
    return int(told[-1][0])


# Writers that are killed.


def kill(run: Path) -> dict[str, Any]:
    """Kill writers in mid-run, each continued on the next node; after each kill all nodes look for what was told."""
    chance, first, missing, num_kills = random.Random(7), 0, 0, 0
    for number in range(KILLS):
        owner, num_told, moment_s = number % dist.get_world_size(), chance.randrange(1, 7), chance.random() * 0.02
        told = []
        if dist.get_rank() == owner:
            writer = Child(commit_known, run, first or None, 10**6)
            told = [writer.hear() for _ in range(num_told)]
            time.sleep(moment_s)
            told += writer.kill()
            num_kills += writer.process.exitcode == -signal.SIGKILL
        last = from_rank(owner, dist.get_rank() == owner and last_acknowledged(told))
        missing += not all(on_all(is_there(run, last)))
        first = last + 1
    return {"kills in mid-run": sum(on_all(num_kills)), "kills after which an acknowledged step was missing": missing}


def is_there(run: Path, step: int) -> bool:
    """Tell whether all steps up to this one can be read, now or once the caches of this node are."""
    ends_at = time.monotonic() + LAG_S
    while (seen := examine(run)).num_steps <= step and not seen.problems and time.monotonic() < ends_at:
        time.sleep(0.2)
    return seen.num_steps > step


# Readers while a run is written.


def read_live(run: Path) -> dict[str, Any]:
    """Write on the first node and read on all."""
    writer = Child(commit_known, run, None, 10**6) if dist.get_rank() == 0 else None
    if writer is not None:
        writer.hear()
    until = from_rank(0, time.time() + LIVE_S)
    readers = [Child(read_until, run, until) for _ in range(-(-READERS // dist.get_world_size()))]
    heard = on_all([reader.hear_all() for reader in readers])
    reads = list(chain.from_iterable(chain.from_iterable(heard)))
    told = from_rank(0, writer.kill() if writer is not None else None)
    lags = [lag_s(read, told) for read in reads]
    times = sorted(took for _, _, took in told)
    return {
        "reads while a run was written": len(reads),
        "torn states that readers saw": sum(bool(seen.problems) for _, seen in reads),
        "longest lag of a reader": max(lags),
        "median lag of a reader": statistics.median(lags),
        "median commit": statistics.median(times),
        "slowest of a hundred commits": times[int(0.99 * len(times))],
        "what readers saw": [seen.problems for _, seen in reads if seen.problems][:3],
    }


def read_until(run: Path, until: float, tell: Tell) -> None:
    """Read again and again; tells when each read began, and what it showed."""
    while (begun := time.time()) < until:
        tell((begun, examine(run)))


def lag_s(read: tuple[float, Seen], told: Sequence[tuple[int, float, float]]) -> float:
    """Return for how long the first step that a read did not show had been durable when it began, in seconds."""
    begun, seen = read
    return max(0.0, begun - told[seen.num_steps][1]) if seen.num_steps < len(told) else 0.0


if __name__ == "__main__":
    direct(Path(sys.argv[1]))
    leave_job(together=False)
