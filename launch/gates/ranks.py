"""A gate that measures in one job: how its ranks are started, what each of them does, and what they tell each other."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from launch.gates.trial import Trial
from launch.gates.worker import join_job, leave_job, write_result

__all__ = ["run_on_ranks", "start_ranks", "values_of_ranks"]


def start_ranks(trial: Trial) -> Mapping[str, object]:
    """Start the ranks of a gate that ends with :func:`run_on_ranks`, and return what they measured."""
    return trial.run_ranks(["--out", str(trial.out / "run"), "--backend", trial.backend])


def run_on_ranks(measure: Callable[[torch.device, Path], Mapping[str, object]]) -> NoReturn:
    """Be a rank that :func:`start_ranks` has started: measure, and hand the result of rank zero back.

    Args:
        measure: called on every rank with its device and a folder that is not there yet.
    """
    options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    write_result(measure(join_job(options["--backend"]), Path(options["--out"])))
    leave_job()


def values_of_ranks(values: Sequence[float], device: torch.device) -> list[list[float]]:
    """Return the values of every rank, in the order of ranks; every rank calls this."""
    mine = torch.tensor(list(values), dtype=torch.float64, device=device)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return [[float(value) for value in row.tolist()] for row in rows]
