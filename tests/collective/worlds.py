"""A recorder in memory, and what every rank of a collective test does."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from aggregator.catalogue import MergedStep
from aggregator.collective import CollectiveAggregator
from telemetry.errors import RankfoldError
from telemetry.protocol import AttachOffer, AttachReply, Deadlines, SinkReport
from telemetry.summary import DEFAULT_DESCRIPTOR
from tests.packets import RUN_ID

__all__ = ["MemoryRecorder", "attach", "offer", "wait_for_failure", "wait_until"]

PATIENT = Deadlines(attach_s=20, merge_s=20, close_s=20)
# For tests in which a deadline has to pass; all others must not depend on how busy the machine is.
IMPATIENT = Deadlines(attach_s=20, merge_s=1.5, close_s=5)


class MemoryRecorder:
    """Keeps merged steps in a list; can refuse, fail at a step, or take its time until a step is durable.

    Attributes:
        steps: those that are durable.
        defer: called with what makes the oldest pending step durable, to be done later; None does it at once.
    """

    def __init__(self, refusal: RankfoldError | None = None, fail_at: int | None = None) -> None:
        self.offer: AttachOffer | None = None
        self.steps: list[MergedStep] = []
        self.is_closed = False
        self.is_aborted = False
        self.is_guarded = False
        self.defer: Callable[[Callable[[], None]], None] | None = None
        self._refusal, self._fail_at = refusal, fail_at
        self._pending: deque[tuple[MergedStep, Future[MergedStep]]] = deque()
        self._has_failed = False

    def claim(self, offer: AttachOffer) -> AttachReply:
        if self._refusal is not None:
            raise self._refusal
        self.offer = offer
        return AttachReply(RUN_ID, 0)

    @property
    def failure(self) -> RankfoldError | None:
        return None

    def guard(self) -> None:
        self.is_guarded = True

    def append(self, step: MergedStep) -> Future[MergedStep]:
        acknowledgement: Future[MergedStep] = Future()
        self._pending.append((step, acknowledgement))
        if self.defer is None:
            self.write_one()
        else:
            self.defer(self.write_one)
        return acknowledgement

    def write_one(self) -> None:
        """Make the oldest pending step durable, unless somebody has."""
        if not self._pending:
            return
        step, acknowledgement = self._pending.popleft()
        self._has_failed = self._has_failed or step.step == self._fail_at
        if self._has_failed:
            acknowledgement.set_exception(OSError("no space left on device"))
        else:
            self.steps.append(step)
            acknowledgement.set_result(step)

    def flush(self) -> None:
        while self._pending:
            self.write_one()

    def close(self, deadline_s: float) -> tuple[SinkReport, ...]:
        assert deadline_s > 0
        self.flush()
        self.is_closed = True
        return (SinkReport("memory", "ok", len(self.steps), 0),)

    def abort(self) -> None:
        self.is_aborted = True


def offer(rank: int, world_size: int, deadlines: Deadlines = PATIENT, **changes: Any) -> AttachOffer:
    """Return what a rank brings to attach when nothing is special."""
    fields: dict[str, Any] = {"to": "memory", "run": {}, "descriptor": DEFAULT_DESCRIPTOR, "deadlines": deadlines}
    return AttachOffer(rank=rank, world_size=world_size, **{**fields, **changes})


def attach(
    rank: int,
    world_size: int,
    deadlines: Deadlines = PATIENT,
    *,
    fan_in: int = 2,
    max_in_flight: int = 8,
    **changes: Any,
) -> tuple[CollectiveAggregator, MemoryRecorder]:
    """Return an attached aggregator and its recorder; the recorder is in use on rank zero only."""
    recorder = MemoryRecorder()
    aggregator = CollectiveAggregator(lambda: recorder, fan_in=fan_in, max_in_flight=max_in_flight)
    aggregator.attach(offer(rank, world_size, deadlines, **changes))
    return aggregator, recorder


def wait_until(condition: Any, deadline_s: float = 20.0) -> None:
    """Wait for a condition that another thread brings about."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)


def wait_for_failure(aggregator: CollectiveAggregator, deadline_s: float = 20.0) -> RankfoldError:
    """Return why merging stopped, once it has."""
    wait_until(lambda: aggregator.failure is not None, deadline_s)
    assert aggregator.failure is not None
    return aggregator.failure
