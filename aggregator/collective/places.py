"""How every rank learns its place in the tree: hosts go to rank zero through the job's store, places come back.

Every rank makes three requests. Rank zero alone reads and writes something for every rank, about 170 bytes in all.
"""

from __future__ import annotations

import json
import socket
from datetime import timedelta
from pathlib import Path
from typing import Final, Protocol

from aggregator.collective.tree import TreePosition, plan_tree

__all__ = ["Store", "find_place", "forget_place", "this_host"]

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
# For rank zero to plan the tree and to tell the places, once all have come; it may have come later than another rank.
_PLAN_S: Final = 2.0


class Store(Protocol):
    """What is needed of ``torch.distributed.Store``."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        ...

    def get(self, key: str) -> bytes:
        """Return the value of a key that is there."""
        ...

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Wait until all keys are there; ``RuntimeError`` after the timeout."""
        ...

    def delete_key(self, key: str) -> bool:
        """Remove a key."""
        ...


def this_host() -> str:
    """Return a name that two processes share if and only if they run on one host.

    A name alone may be the same on many machines, and a kernel's boot id the same in many containers; what a launcher
    says about local ranks may be wrong or absent.
    """
    boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot_id}"


def find_place(
    store: Store, rank: int, world_size: int, *, host: str | None, fan_in: int, timeout_s: float
) -> TreePosition:
    """Return where this rank stands in the tree. Called on every rank.

    Args:
        store: that all ranks share, with keys of this attempt alone.
        rank, world_size: of this process.
        host: name of this rank's host, found if None.
        fan_in: most children of a rank; that of rank zero counts.
        timeout_s: for all ranks to come.

    Raises:
        RuntimeError: some rank did not.
    """
    store.set(f"host/{rank}", host or this_host())
    if rank == 0:
        keys = [f"host/{other}" for other in range(world_size)]
        store.wait(keys, timedelta(seconds=timeout_s))
        for position in plan_tree([store.get(key).decode() for key in keys], fan_in):
            store.set(f"place/{position.rank}", json.dumps(position.to_wire()))
    key = f"place/{rank}"
    store.wait([key], timedelta(seconds=timeout_s + _PLAN_S))
    return TreePosition.from_wire(json.loads(store.get(key)))


def forget_place(store: Store, rank: int) -> None:
    """Remove what the store keeps of this rank; its place is known by now to whom it concerns."""
    for key in (f"host/{rank}", f"place/{rank}"):
        store.delete_key(key)
