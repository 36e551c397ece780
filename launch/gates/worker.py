"""The side of a gate that its ranks run: join the job, exchange values, and hand back what was measured."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from launch.gates.trial import RESULT_VARIABLE

__all__ = ["from_rank", "join_job", "leave_job", "on_all", "write_result"]


def join_job(backend: str, timeout_s: float = 60.0) -> torch.device:
    """Join the process group that torchrun describes, and return the device of this rank. Every rank calls this."""
    torch.set_num_threads(1)
    local_rank = int(os.environ["LOCAL_RANK"])
    if backend == "gloo":
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), device_id=device)
    return device


def on_all(value: Any) -> list[Any]:
    """Return the values of all ranks in their order. Every rank calls this."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def from_rank(rank: int, value: Any) -> Any:
    """Return the value of one rank, which the others do not have. Every rank calls this."""
    return on_all(value)[rank]


def leave_job(*, together: bool = True) -> NoReturn:
    """End this rank with exit code 0, once the result is written.

    Threads of gloo outlive ``destroy_process_group``. Where one still lets go of its last tensor while the interpreter
    is taken down, the process ends by SIGABRT (pytorch/pytorch#179291), so the interpreter is not taken down.

    Args:
        together: whether ranks wait for each other first; not where a gate has put some of them out of reach.
    """
    if together:
        dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def write_result(measured: Mapping[str, Any]) -> None:
    """Write what was measured, by name and JSON-serialisable; rank zero's counts, other ranks' calls do nothing."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    target = Path(os.environ[RESULT_VARIABLE])
    draft = target.with_suffix(".draft")
    draft.write_text(json.dumps(measured))
    draft.replace(target)
