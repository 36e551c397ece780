"""What ranks tell of their training loops, in files of a folder that all share, and how long the loops stood still."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

__all__ = ["gather", "longest_pause", "tell"]


def tell(folder: Path, rank: int, what: Mapping[str, Any]) -> None:
    """Hand to rank zero what happened on this rank, JSON-serialisable. Needs no connection between ranks."""
    draft = folder / f"draft-{rank}"
    draft.write_text(json.dumps(what))
    draft.replace(folder / f"rank-{rank}.json")


def gather(folder: Path, world_size: int, within_s: float) -> dict[int, Any]:
    """Return what each rank told.

    Raises:
        TimeoutError: some did not in time.
    """
    files = {rank: folder / f"rank-{rank}.json" for rank in range(world_size)}
    ends_at = time.monotonic() + within_s
    while time.monotonic() < ends_at and not all(file.exists() for file in files.values()):
        time.sleep(0.1)
    if silent := [rank for rank, file in files.items() if not file.exists()]:
        raise TimeoutError(f"ranks {silent} did not come to the end of their loop")
    return {rank: json.loads(file.read_text()) for rank, file in files.items()}


def longest_pause(ends: Sequence[float]) -> float:
    """Return the longest time between two ends of steps, after the first two steps, which set things up."""
    return max(after - before for before, after in pairwise(ends[2:]))
