"""Which rank this process is, asked of the process group and of nothing else."""

from __future__ import annotations

import os

import torch.distributed as dist

from telemetry.errors import ProcessGroupMissingError

__all__ = ["rank_and_world_size"]


def rank_and_world_size() -> tuple[int, int]:
    """Return (rank, world size) of the default process group, (0, 1) where there is none.

    Raises:
        ProcessGroupMissingError: the launcher announced several ranks, but nothing was initialised. Each process
            would otherwise take itself for rank zero.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    announced = os.environ.get("WORLD_SIZE", "1")
    if announced.isdigit() and int(announced) > 1:
        raise ProcessGroupMissingError(
            f"WORLD_SIZE is {announced}, but torch.distributed is not initialised",
            remedy="call torch.distributed.init_process_group before telemetry.watch",
        )
    return 0, 1
