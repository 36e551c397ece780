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
from aggregator.sinks.admission import require_valid_sinks
from aggregator.sinks.ledger import SinkLedger
from aggregator.sinks.protocol import ExactingSink, RunInfo, Sink
from telemetry.protocol import SinkReport

__all__ = ["QUEUE_STEPS", "SinkRunner", "require_valid_sinks"]

QUEUE_STEPS: Final = 64


class SinkRunner:
    """Owns the sinks of a run, on the rank that writes the record."""

    def __init__(self, sinks: Sequence[object], run: RunInfo, queue_steps: int = QUEUE_STEPS) -> None:
        """Begin to open every sink in the background.

        Args:
            sinks: distinct sinks, not opened yet.
            run: what they are told.
            queue_steps: how many steps may wait for a sink before steps are dropped.

        Raises:
            ConfigurationError: a subclass; see :func:`aggregator.sinks.admission.require_valid_sinks`.
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
        self._ledger = SinkLedger()
        self._doing = "open"
        self._failure = ""
        self.thread = threading.Thread(target=self._run_sink, name=f"rankfold-sink-{self._name}", daemon=True)

    def offer(self, step: MergedStep) -> None:
        with self._lock:
            self._ledger.offered(step)
            if self._failure or self._queue.qsize() >= self._queue_steps:
                self._ledger.dropped(step)
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
            return SinkReport(
                self._name,
                state,
                self._ledger.num_emitted,
                self._ledger.num_dropped,
                detail,
                self._ledger.rows(),
                tuple(self._sink.disclosures) if isinstance(self._sink, ExactingSink) else (),
            )

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
                self._ledger.emitted(step)
            if self._queue.empty():
                self._doing = "flush"
                self._sink.flush()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if not self._failure:
                self._failure = f"{self._doing}: {type(error).__name__}: {error}"
            while not self._queue.empty():
                self._queue.get()
            self._ledger.give_up()
