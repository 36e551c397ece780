"""The merged record of data-parallel ranks equals the statistics of the tensors gathered from all of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import telemetry
from launch.gates import Gate, Needs, Trial
from launch.gates.comparison import EXACTNESS, compare_record
from launch.gates.gathered import GatheredReference
from launch.gates.model import SmallDecoder, loss_of, make_tokens
from launch.gates.worker import join_job, write_result

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
STEPS, MICRO_BATCHES, LENGTH = 3, 2, 8


def run(trial: Trial) -> Mapping[str, object]:
    """Start the ranks and return the comparison."""
    return trial.run_ranks(["--out", str(trial.out / "run"), "--backend", trial.backend])


def measure(device: torch.device, to: Path) -> dict[str, object]:
    """Train observed, gather, and compare; every rank runs this, and the result counts on rank zero."""
    rank = dist.get_rank()
    model = SmallDecoder().to(device)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    reference = GatheredReference(model)
    with telemetry.watch(parallel, optimizer=optimizer, to=to, every=1, hist_every=1, full_updates=True) as session:
        for step in range(1, STEPS + 1):
            reference.begin_step()
            with session.step(step):
                optimizer.zero_grad()
                for part in range(MICRO_BATCHES):
                    batch = make_tokens(MICRO_BATCHES * step + part, rank, 2 + rank % 3, LENGTH)
                    loss_of(parallel, batch, device).backward()
                reference.before_update()
                optimizer.step()
            reference.end_step(step)
    return compare_record(to, reference.summaries) if rank == 0 else {}


if __name__ == "__main__":
    options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    result = measure(join_job(options["--backend"]), Path(options["--out"]))
    write_result(result)
    dist.destroy_process_group()
