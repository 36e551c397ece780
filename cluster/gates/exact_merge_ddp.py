"""The merged record of data-parallel ranks equals the statistics of the tensors gathered from all of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from launch.gates import Gate, Needs, Trial
from launch.gates.comparison import EXACTNESS
from launch.gates.exactness import train_and_compare
from launch.gates.model import SmallDecoder
from launch.gates.ranks import run_on_ranks, start_ranks

GATE = Gate(
    name="exact-merge-ddp",
    purpose="under DDP every count and histogram bin of all five signals equals that of the gathered tensors",
    procedure=(
        "A small decoder trains three steps of two micro-batches under DDP; ranks have batches of different sizes. "
        "Outputs of modules and their gradients are gathered from all ranks by all_gather, and summarised in float64 "
        "by one process, as are parameters, gradients and updates. Each field of the record is compared with that."
    ),
    needs=Needs(gpus_per_node=2),
    limits=EXACTNESS,
    rehearsal="the merge over processes and the C kernel; not the reduction on a GPU, nor NCCL beside the merge",
    deadline_s=180.0,
)


def run(trial: Trial) -> Mapping[str, object]:
    """Start the ranks and return the comparison."""
    return start_ranks(trial)


def measure(device: torch.device, to: Path) -> dict[str, object]:
    """Train observed, gather, and compare; every rank runs this, and the result counts on rank zero."""
    model = SmallDecoder().to(device)
    return train_and_compare(model, device, to, called=DistributedDataParallel(model))


if __name__ == "__main__":
    run_on_ranks(measure)
