"""The merged record of FSDP2 shards equals the statistics of the full tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from launch.gates import Gate, Needs, Trial
from launch.gates.comparison import EXACTNESS
from launch.gates.exactness import train_and_compare
from launch.gates.model import SmallDecoder
from launch.gates.ranks import run_on_ranks, start_ranks

GATE = Gate(
    name="exact-merge-fsdp2",
    purpose="under FSDP2 every count and histogram bin of all five signals equals that of the full tensors",
    procedure=(
        "A small decoder trains three steps of two micro-batches under fully_shard. It has a scale of one element, so "
        "that ranks have shards of different sizes and empty ones. Parameters and gradients become whole by "
        "full_tensor(), outputs of modules and their gradients by all_gather; one process summarises them in float64. "
        "Each field of the record is compared with that."
    ),
    needs=Needs(gpus_per_node=2),
    limits=EXACTNESS,
    rehearsal="the merge of shards and the C kernel; not the reduction on a GPU, nor NCCL beside the merge",
    deadline_s=180.0,
)


def run(trial: Trial) -> Mapping[str, object]:
    """Start the ranks and return the comparison."""
    return start_ranks(trial)


def measure(device: torch.device, to: Path) -> dict[str, object]:
    """Train observed, gather, and compare; every rank runs this, and the result counts on rank zero."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = SmallDecoder(has_scale=True).to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train_and_compare(model, device, to)


if __name__ == "__main__":
    run_on_ranks(measure)
