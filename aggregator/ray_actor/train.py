"""Ray Train (v2): the layout of a worker, and a callback for the controller.

Importing this module needs Ray with its ``train`` extra; nothing else of Rankfold imports it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from ray.train import Checkpoint, UserCallback, get_context

from aggregator.ray_actor.actors import ActorNames, find_actor
from aggregator.ray_actor.library import connect, job_key
from aggregator.ray_actor.query import read_status
from aggregator.ray_actor.status import ActorStatus
from telemetry.errors import LayoutMismatchError
from telemetry.layout import ParallelLayout

__all__ = ["RecordCallback", "log_status", "train_layout"]

# The program's own logging decides what becomes of it; nothing is configured here.
_LOGGER: Final = logging.getLogger("rankfold")
_ANSWER_S: Final = 30.0


def train_layout(**inner: int) -> ParallelLayout:
    """Return the layout of the workers of this Ray Train run. Called inside of the worker loop, on every worker.

    Args:
        inner: sizes of the axes inside of data parallelism, outermost first; none for data parallelism alone.

    Raises:
        LayoutMismatchError: they do not divide the number of workers.

    Example:
        ``train_layout()`` with 8 workers is ``{"dp": 8}``, ``train_layout(tp=2)`` is ``{"dp": 4, "tp": 2}``.
    """
    world_size, size = get_context().get_world_size(), 1
    for axis_size in inner.values():
        size *= axis_size
    if size < 1 or world_size % size:
        raise LayoutMismatchError(
            f"the axes {dict(inner)} do not divide the {world_size} workers of this run",
            rank=get_context().get_world_rank(),
            remedy="give sizes whose product divides ScalingConfig.num_workers",
        )
    return ParallelLayout.from_sizes({"dp": world_size // size, **inner})


def log_status(status: ActorStatus) -> None:
    """Say in one line how far the record of a run is: a warning where it lacks something."""
    account = status.account
    text = (
        f"record of {status.name}: {account.num_committed} steps up to {account.last_committed_step}, "
        f"{account.num_partial} of them lack ranks, {status.num_pending_steps} are on their way, {status.state}"
    )
    is_well = not (account.num_partial or status.silent_ranks or status.failure)
    _LOGGER.log(logging.INFO if is_well else logging.WARNING, "%s%s", text, status.failure and f"; {status.failure}")


class RecordCallback(UserCallback):
    """Reports the coverage of the record, and closes it when an attempt has failed; give it to ``RunConfig``.

    Runs in the controller of the run, never in a worker, and never holds the controller up. A run whose workers leave
    their sessions closes its record by itself.

    Example:
        ``RunConfig(callbacks=[RecordCallback("ray://exp1")], failure_config=FailureConfig(max_failures=3))``
    """

    def __init__(self, to: str, show: Callable[[ActorStatus], None] = log_status, every_s: float = 60.0) -> None:
        """Name the run.

        Args:
            to: the destination that the workers give to ``watch``.
            show: takes the status after a report of the workers, and after the close of a failed attempt.
            every_s: least time between two shows, in seconds.
        """
        self._to, self._show, self._every_s = to, show, every_s
        self._shown_at = float("-inf")

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Checkpoint | None) -> None:
        """Show how far the record is; called by the controller when all workers have reported."""
        now = time.monotonic()
        if now - self._shown_at >= self._every_s:
            self._shown_at = now
            self._in_background(lambda: self._show_all(self._job(run_context)))

    def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Exception]) -> None:
        """Close the record of the attempt that failed; called by the controller before it starts workers anew."""
        ranks = ", ".join(map(str, sorted(worker_exceptions)))
        first = next(iter(worker_exceptions.values()), None)
        reason = f"ranks {ranks} failed with {type(first).__name__}"
        self._in_background(lambda: self._end_all(self._job(run_context), reason))

    def _job(self, run_context: Any) -> str:
        return job_key(run_context.get_run_config().name)

    def _show_all(self, job: str) -> None:
        for status in read_status(self._to):
            if status.job == job:
                self._show(status)

    def _end_all(self, job: str, reason: str) -> None:
        ray = connect()
        for status in read_status(self._to):
            names = ActorNames(status.name, status.attempt)
            if status.job == job and (actor := find_actor(names, names.root)) is not None:
                ended = actor.end.remote(reason)
                self._show(status)
                ray.wait([ended], timeout=_ANSWER_S)

    def _in_background(self, work: Callable[[], None]) -> None:
        threading.Thread(target=_quietly, args=(work,), name="rankfold-report", daemon=True).start()


def _quietly(work: Callable[[], None]) -> None:
    try:
        work()
    except Exception as error:
        _LOGGER.warning("the record could not be asked how it is: %s: %s", type(error).__name__, error)
