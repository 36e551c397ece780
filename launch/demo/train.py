"""Train a small GPT with DDP and keep one record of all ranks.

Run it under torchrun, by path, as you would run your own script:

    torchrun --standalone --nproc-per-node 2 train.py --out runs/mine
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import telemetry
from aggregator.sinks import JsonlSink, TensorBoardSink
from demo_model import ByteGPT, GPTConfig
from demo_progress import progress
from demo_text import ByteBatches, standard_library_text

BATCH_SIZE = 8


def parse_arguments(*, with_workers: bool = False) -> argparse.Namespace:
    """Read the command line; ``with_workers`` where no launcher has decided on the number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="run directory, new or empty")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=5, help="steps between records")
    parser.add_argument("--hist-every", type=int, default=20, help="steps between records with histograms")
    parser.add_argument("--seed", type=int, default=0)
    if with_workers:
        parser.add_argument("--workers", type=int, default=2)
    return parser.parse_args()


def join_job() -> torch.device:
    """Join the process group that torchrun describes; one GPU a rank where there are enough, else the CPU."""
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() < local_size:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    return torch.device("cuda", local_rank)


def train(
    args: argparse.Namespace, device: torch.device, to: str, layout: telemetry.ParallelLayout | None = None
) -> None:
    """Train ``args.steps`` steps and keep the record at ``to``; every rank runs this."""
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    config = GPTConfig()
    model = ByteGPT(config).to(device)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = standard_library_text()
    batches = ByteBatches(text, batch_size=BATCH_SIZE, context=config.context, seed=args.seed, rank=rank)

    with telemetry.watch(
        model,
        optimizer=optimizer,
        to=to,
        layout=layout,
        every=args.every,
        hist_every=args.hist_every,
        sinks=[TensorBoardSink(args.out / "tb"), JsonlSink(args.out / "record.jsonl")],
    ) as session:
        if rank == 0:
            print(session.plan, flush=True)
        with progress(args.steps, rank=rank) as show:
            for step in range(1, args.steps + 1):
                with session.step(step):
                    inputs, targets = (batch.to(device) for batch in batches.draw())
                    loss = cross_entropy(parallel(inputs).flatten(0, 1), targets.flatten())
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                show(step, loss.item())
    if rank == 0:
        print(session.report, flush=True)


@record
def main() -> None:
    """Join the job, train, leave the job."""
    device = join_job()
    args = parse_arguments()
    train(args, device, str(args.out))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
