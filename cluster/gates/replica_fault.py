"""A bit that differs on one replica of a weight is found, and named by site, axis and rank."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import telemetry
from aggregator import open_history
from launch.gates import Gate, Limit, Needs, NotRunError, Trial
from launch.gates.worker import join_job, leave_job, write_result

GATE = Gate(
    name="replica-fault",
    purpose="one flipped bit in one replica of a weight is named by site, axis and rank, and nothing else is",
    procedure=(
        "At least three ranks hold the same small model. After the second of four steps the last rank flips the "
        "lowest bit of one element of one weight. The record is read afterwards."
    ),
    needs=Needs(gpus_per_node=2),
    limits=(
        Limit("findings of the flipped weight on the right rank", "at least", 1),
        Limit("findings of anything else", "equal to", 0),
        Limit("findings before the flip", "equal to", 0),
    ),
    rehearsal="the procedure and the comparison of fingerprints on the CPU; not the reduction on a GPU",
    deadline_s=120.0,
)
SITE, STEPS, FLIPPED_AFTER = "1.weight", 4, 2
# So that the others are a majority.
LEAST_RANKS = 3


def run(trial: Trial) -> Mapping[str, object]:
    """Start the ranks and count what the record says of them."""
    num_ranks = max(LEAST_RANKS, trial.num_ranks) if trial.is_rehearsal else trial.num_ranks
    if trial.num_nodes * num_ranks < LEAST_RANKS:
        raise NotRunError(f"which of two replicas is wrong nobody can tell: the gate needs {LEAST_RANKS} ranks")
    arguments = ["--out", str(trial.out / "run"), "--backend", trial.backend]
    measured: dict[str, object] = trial.run_ranks(arguments, num_ranks=num_ranks)
    return measured


def train(to: Path, backend: str) -> None:
    """Train, flip, and read the record; every rank runs this."""
    device = join_job(backend)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4)).to(device)
    with telemetry.watch(model, to=to, signals=("parameters",), every=1) as session:
        for step in range(1, STEPS + 1):
            with session.step(step):
                model(torch.ones(2, 16, device=device)).sum().backward()
            if step == FLIPPED_AFTER and rank == world_size - 1:
                flip_lowest_bit(model.get_parameter(SITE))
    if rank == 0:
        write_result(count(to, world_size - 1))


@torch.no_grad()
def flip_lowest_bit(weight: torch.Tensor) -> None:
    """Change the first element by one unit in the last place."""
    weight.view(torch.int32)[0, 0] ^= 1


def count(to: Path, rank: int) -> dict[str, object]:
    """Return the measured quantities of the limits."""
    found = [{**row, **json.loads(row["details"])} for row in open_history(to).findings().to_pylist()]
    return {
        "findings of the flipped weight on the right rank": sum(is_of_flip(row, rank) for row in found),
        "findings of anything else": sum(row["site"] != SITE for row in found),
        "findings before the flip": sum(row["step"] <= FLIPPED_AFTER for row in found),
        "first message": found[0]["message"] if found else "",
    }


def is_of_flip(row: Mapping[str, Any], rank: int) -> bool:
    """Tell whether a finding names the flipped weight and the rank that holds it."""
    is_named = row["site"] == SITE and rank in row["ranks"]
    return is_named and row["code"] == "replica_disagreement" and row["step"] > FLIPPED_AFTER


if __name__ == "__main__":
    options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    train(Path(options["--out"]), options["--backend"])
    leave_job()
