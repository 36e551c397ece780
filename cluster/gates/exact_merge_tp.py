"""The merged record of tensor-parallel ranks equals the statistics of the full tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import telemetry
from launch.gates import Gate, Needs, Trial
from launch.gates.comparison import EXACTNESS
from launch.gates.exactness import train_and_compare
from launch.gates.gathered import gather_parts
from launch.gates.model import SmallDecoder
from launch.gates.ranks import run_on_ranks, start_ranks

GATE = Gate(
    name="exact-merge-tp",
    purpose="under tensor and sequence parallelism every count and histogram bin of all five signals is exact",
    procedure=(
        "A small decoder trains three steps of two micro-batches with its projections split over tp and its residual "
        "stream over the sequence, on a mesh of dp and tp, dp being 2 from four ranks on. Parameters and gradients "
        "become whole by full_tensor(), outputs of modules and their gradients by all_gather over the ranks that hold "
        "different elements; one process summarises them in float64. Each field of the record is compared with that."
    ),
    needs=Needs(gpus_per_node=2),
    limits=EXACTNESS,
    rehearsal="placements, the merge and the C kernel; not the reduction on a GPU, nor NCCL beside the merge",
    deadline_s=180.0,
)
# What the parallel plan below makes of the outputs that are plain tensors; those of norms are DTensors, which tell.
SPLIT = {"query": -1, "key": -1, "value": -1, "up": -1, "act": -1, "mix": 1, "attention": 1, "down": 1, "embed": 1}


def run(trial: Trial) -> Mapping[str, object]:
    """Start the ranks and return the comparison."""
    return start_ranks(trial)


def measure(device: torch.device, to: Path) -> dict[str, object]:
    """Train observed, gather, and compare; every rank runs this, and the result counts on rank zero."""
    world_size = dist.get_world_size()
    num_data = 2 if world_size >= 4 and world_size % 2 == 0 else 1
    mesh = init_device_mesh(device.type, (num_data, world_size // num_data), mesh_dim_names=("dp", "tp"))
    model = SmallDecoder(num_heads=2 * mesh["tp"].size()).to(device)
    parallelise(model, mesh["tp"])
    data_group = mesh.get_group("dp")
    return train_and_compare(
        model,
        device,
        to,
        data_rank=mesh.get_local_rank("dp"),
        length=4 * mesh["tp"].size(),
        # Every rank of tp has the same logits.
        joins={"head": lambda part: gather_parts(part, data_group)},
        reduce_gradients=lambda: reduce_gradients(model, data_group),
        layout=mesh,
        placements=placements(),
    )


def parallelise(model: SmallDecoder, mesh: DeviceMesh) -> None:
    """Split the projections over tp and what lies between them over the sequence, dim 1."""
    gathered: dict[str, Any] = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "norm_attention": SequenceParallel(),
                "attention": PrepareModuleInput(**gathered),
                **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
                "attention.mix": RowwiseParallel(output_layouts=Shard(1)),
                "norm_mlp": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)


def placements() -> dict[Any, Any]:
    """Declare where the plain outputs lie; their gradients lie there as well."""
    declared: dict[Any, Any] = {}
    for kind in ("activation", "activation_grad"):
        declared |= {(kind, f"*{name}"): {"tp": telemetry.Shard(dim)} for name, dim in SPLIT.items()}
        declared[kind, "blocks.?"] = {"tp": telemetry.Shard(1)}
        declared[kind, "head"] = {"tp": telemetry.Replica()}
    return declared


@torch.no_grad()
def reduce_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Bring every gradient to the placement of its parameter, and average it over the data-parallel ranks."""
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        gradient = parameter.grad
        assert isinstance(gradient, DTensor)
        parameter.grad = gradient.redistribute(placements=parameter.placements)
        local = parameter.grad.to_local()
        dist.all_reduce(local, group=group)
        local /= dist.get_world_size(group)


if __name__ == "__main__":
    run_on_ranks(measure)
