"""Run a test body on real ranks: one process each, one gloo group, one hard deadline.

The processes come from a fork server that has torch loaded, so that a world of four costs tenths of a second after
the first one.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

__all__ = ["FORKSERVER", "RankDied", "RanksError", "run_ranks"]

# A process has one fork server, and the last list of modules that it is given wins: tests that fork share this one.
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(
    [
        # What torch would otherwise import at the first optimizer, in every rank.
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "pytest",
        "hypothesis",
        "telemetry",
        "aggregator.collective",
        "aggregator.history",
        "aggregator.testing.packets",
    ]
)


@dataclass(frozen=True)
class RankDied:
    """Stands in the results for a rank that ended without one; ``exit_code`` is negative for a signal."""

    exit_code: int | None


class RanksError(AssertionError):
    """Some ranks failed.

    Attributes:
        failures: rank → traceback, exit code, or where the rank stood at the deadline.
    """

    def __init__(self, failures: dict[int, str]) -> None:
        self.failures = failures
        super().__init__("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(failures.items())))


def run_ranks(
    body: Callable[..., Any],
    world_size: int,
    *args: Any,
    deadline_s: float = 60.0,
    may_die: Collection[int] = (),
) -> list[Any]:
    """Call ``body(rank, world_size, *args)`` on every rank and return the results in rank order.

    Args:
        body: a function at module level; inside it, ``torch.distributed`` has a gloo group of all ranks.
        world_size: number of processes.
        args: for the body, picklable, the same on all ranks.
        deadline_s: after it, the ranks that still run are killed and named.
        may_die: ranks that the test kills; they return :class:`RankDied`.

    Raises:
        RanksError: a rank raised, died or was late; chained to the first exception that a rank raised.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        world = [_Rank(rank, world_size, body, args, Path(folder), deadline_s) for rank in range(world_size)]
        try:
            _gather(world, time.monotonic() + deadline_s)
        finally:
            for rank in world:
                rank.end()
    failures = {rank.rank: rank.failure for rank in world if rank.failure and rank.rank not in may_die}
    if failures:
        cause = next((rank.error for rank in world if rank.error is not None), None)
        raise RanksError(failures) from cause
    return [rank.result for rank in world]


def _gather(world: list[_Rank], deadline: float) -> None:
    open_ranks = {rank.pipe: rank for rank in world}
    while open_ranks:
        ready = wait(list(open_ranks), max(0.0, deadline - time.monotonic()))
        if not ready:
            for rank in open_ranks.values():
                rank.tell_where_it_stands()
            return
        for pipe in ready:
            assert isinstance(pipe, Connection)
            open_ranks.pop(pipe).read()


class _Rank:
    """The parent's side of one process."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        body: Callable[..., Any],
        args: tuple[Any, ...],
        folder: Path,
        deadline_s: float,
    ) -> None:
        self.rank = rank
        self.result: Any = None
        self.failure = ""
        self.error: BaseException | None = None
        self._stacks = folder / f"stacks-{rank}"
        self.pipe, theirs = FORKSERVER.Pipe(duplex=False)
        self._process = FORKSERVER.Process(
            target=_run_rank, args=(theirs, rank, world_size, body, args, str(folder), deadline_s), daemon=True
        )
        self._process.start()
        theirs.close()

    def read(self) -> None:
        """Take what the rank sent; an end of file instead means that it died."""
        try:
            self.result, self.failure, self.error = self.pipe.recv()
        except EOFError:
            self._process.join(5)
            self.result = RankDied(self._process.exitcode)
            self.failure = f"ended without a result, exit code {self._process.exitcode}"
            return
        self._process.join(10)
        if self._process.exitcode != 0 and not self.failure:
            self.failure = f"returned, then ended with exit code {self._process.exitcode}"

    def tell_where_it_stands(self) -> None:
        """Describe a rank that missed the deadline by the stacks of its threads."""
        pid = self._process.pid
        if pid is not None and self._process.is_alive():
            os.kill(pid, signal.SIGUSR1)
            self._process.join(0.3)
        stacks = self._stacks.read_text() if self._stacks.exists() else ""
        self.failure = f"still running at the deadline\n{stacks}"

    def end(self) -> None:
        """Kill the process if it is still there, and release it."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join(5)
        self.pipe.close()


def _run_rank(
    pipe: Connection,
    rank: int,
    world_size: int,
    body: Callable[..., Any],
    args: tuple[Any, ...],
    folder: str,
    deadline_s: float,
) -> None:
    import torch
    import torch.distributed as dist

    with open(f"{folder}/stacks-{rank}", "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        torch.set_num_threads(1)
        try:
            store = dist.FileStore(f"{folder}/store", world_size)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=deadline_s)
            )
            outcome: tuple[Any, str, BaseException | None] = (body(rank, world_size, *args), "", None)
        except BaseException as error:
            outcome = (None, traceback.format_exc(), error)
        _send(pipe, outcome)
        pipe.close()
        faulthandler.unregister(signal.SIGUSR1)


def _send(pipe: Connection, outcome: tuple[Any, str, BaseException | None]) -> None:
    try:
        pipe.send(outcome)
    except Exception:
        # What the body returned or raised does not pickle; the text of it always does.
        pipe.send((None, outcome[1] or traceback.format_exc(), None))
