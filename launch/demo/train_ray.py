"""Train the same small GPT under Ray Train, with one record of all workers in an actor.

Run it as any program, by path; it starts a Ray cluster on this machine, or joins the one that RAY_ADDRESS names:

    python train_ray.py --out runs/mine --workers 2
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device
from torch.distributed.elastic.multiprocessing.errors import record

from aggregator.ray_actor.train import RecordCallback, train_layout
from train import parse_arguments, train

NAME = "rankfold-demo"


@record
def train_worker(config: dict[str, Any]) -> None:
    """Train on one worker; Ray Train has made the process group."""
    args = argparse.Namespace(**config)
    torch.set_num_threads(1)
    train(args, get_device(), f"ray://{NAME}?dir={args.out}", train_layout())


def main() -> None:
    """Start the workers and wait for their end."""
    args = parse_arguments(with_workers=True)
    args.out = Path(args.out).absolute()
    needed = args.workers + 1
    ray.init(
        address=os.environ.get("RAY_ADDRESS", "local"),
        num_cpus=None if "RAY_ADDRESS" in os.environ else needed,
        include_dashboard=False,
        # Actors of Ray Train warn every second that there is no dashboard.
        logging_config=ray.LoggingConfig(log_level="ERROR"),
    )
    # Ray's stubs know the callbacks of its first version alone.
    callbacks: list[Any] = [RecordCallback(f"ray://{NAME}")]
    with tempfile.TemporaryDirectory(prefix="rankfold-demo-") as storage:
        trainer = TorchTrainer(
            train_worker,
            train_loop_config=vars(args),
            scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=torch.cuda.device_count() >= args.workers),
            run_config=RunConfig(name=NAME, storage_path=storage, callbacks=callbacks),
        )
        trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
