"""Runs sinks beside the record, each in a thread of its own behind a bounded queue, so that none can hold up anything.

A sink that needs a minute to start finds the steps of that minute waiting. One that falls further behind than the
queue is long loses steps, which are counted. One that raises is out, and its siblings go on.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Final

from aggregator.catalogue import MergedStep
from aggregator.sinks.protocol import CAPABILITIES, RunInfo, Sink
from telemetry.errors import ConfigurationError, SinkDuplicateError
from telemetry.protocol import SinkReport

__all__ = ["QUEUE_STEPS", "SinkRunner", "require_valid_sinks"]

QUEUE_STEPS: Final = 64


def require_valid_sinks(sinks: Sequence[object]) -> tuple[Sink, ...]:
    """Return the sinks, typed.

    Raises:
        SinkDuplicateError: one object was given twice.
        ConfigurationError: an object is no sink, or claims a capability that does not exist.
    """
    valid = []
    for i, sink in enumerate(sinks):
        if any(sink is earlier for earlier in sinks[:i]):
            raise SinkDuplicateError(
                f"sink {getattr(sink, 'name', sink)!r} was given twice", remedy="give each sink once"
            )
        if isinstance(sink, type) or not isinstance(sink, Sink):
            raise ConfigurationError(
                f"{sink!r} is no sink", remedy="give objects with the methods of aggregator.sinks.Sink"
            )
        if unknown := sorted(sink.capabilities - CAPABILITIES):
            raise ConfigurationError(
                f"sink {sink.name!r} claims capabilities {unknown}", remedy=f"use words of {sorted(CAPABILITIES)}"
            )
        valid.append(sink)
    return tuple(valid)


class SinkRunner:
    """Owns the sinks of a run, on the rank that writes the record."""

    def __init__(self, sinks: Sequence[object], run: RunInfo, queue_steps: int = QUEUE_STEPS) -> None:
        """Begin to open every sink in the background.

        Args:
            sinks: distinct sinks, not opened yet.
            run: what they are told.
            queue_steps: how many steps may wait for a sink before steps are dropped.

        Raises:
            SinkDuplicateError, ConfigurationError: see :func:`require_valid_sinks`.
        """
        self._workers = tuple(_SinkWorker(sink, run, queue_steps) for sink in require_valid_sinks(sinks))
        for worker in self._workers:
            worker.thread.start()

    def emit(self, step: MergedStep) -> None:
        """Hand a committed step to every sink. Returns at once and never raises."""
        for worker in self._workers:
            worker.offer(step)

    def begin_segment(self, run: RunInfo) -> None:
        """Tell every sink, in the order of its steps, that the run continues with a new segment; see ``Sink``."""
        for worker in self._workers:
            worker.begin_segment(run)

    def close(self, deadline_s: float) -> tuple[SinkReport, ...]:
        """Let the sinks finish together within ``deadline_s`` seconds, and say what became of each, in their order.

        A sink that is still busy is reported ``late`` and left to its daemon thread.
        """
        deadline = time.monotonic() + deadline_s
        for worker in self._workers:
            worker.finish()
        for worker in self._workers:
            worker.thread.join(max(0.0, deadline - time.monotonic()))
        return tuple(worker.report() for worker in self._workers)


class _SinkWorker:
    """One sink, its queue and its thread."""

    def __init__(self, sink: Sink, run: RunInfo, queue_steps: int) -> None:
        self._sink = sink
        self._name = sink.name
        self._run = run
        # Bounded by offer, not by the queue, so that the end mark always finds room.
        self._queue: queue.Queue[MergedStep | RunInfo | None] = queue.Queue()
        self._queue_steps = queue_steps
        self._lock = threading.Lock()
        self._num_emitted = 0
        self._num_dropped = 0
        self._doing = "open"
        self._failure = ""
        self.thread = threading.Thread(target=self._run_sink, name=f"rankfold-sink-{self._name}", daemon=True)

    def offer(self, step: MergedStep) -> None:
        with self._lock:
            if self._failure or self._queue.qsize() >= self._queue_steps:
                self._num_dropped += 1
            else:
                self._queue.put(step)

    def begin_segment(self, run: RunInfo) -> None:
        with self._lock:
            if not self._failure:
                self._queue.put(run)

    def finish(self) -> None:
        self._queue.put(None)

    def report(self) -> SinkReport:
        with self._lock:
            state = "failed" if self._failure else "late" if self.thread.is_alive() else "ok"
            detail = self._failure
            if state == "late":
                waiting = sum(isinstance(step, MergedStep) for step in tuple(self._queue.queue))
                detail = f"still in {self._doing}, {waiting} steps wait"
            return SinkReport(self._name, state, self._num_emitted, self._num_dropped, detail)

    def _run_sink(self) -> None:
        try:
            self._sink.open(self._run)
            self._emit_all()
        except BaseException as error:
            self._fail(error)
        try:
            self._doing = "close"
            self._sink.close()
        except BaseException as error:
            self._fail(error)

    def _emit_all(self) -> None:
        while True:
            self._doing = "wait"
            step = self._queue.get()
            if step is None:
                return
            if isinstance(step, RunInfo):
                self._doing = f"begin_segment {step.segment}"
                # Optional: a sink to which the number of a step means nothing need not know.
                if (begin_segment := getattr(self._sink, "begin_segment", None)) is not None:
                    begin_segment(step)
                continue
            self._doing = f"emit of step {step.step}"
            self._sink.emit(step)
            with self._lock:
                self._num_emitted += 1
            if self._queue.empty():
                self._doing = "flush"
                self._sink.flush()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if not self._failure:
                self._failure = f"{self._doing}: {type(error).__name__}: {error}"
            while not self._queue.empty():
                self._num_dropped += isinstance(self._queue.get(), MergedStep)
            # The step that raised was taken from the queue and is not in the sink.
            self._num_dropped += self._doing.startswith("emit")
