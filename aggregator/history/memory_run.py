"""A run without a directory: ``memory://NAME?keep=256&when_full=refuse``, written and read in one process.

The names are those of this process. A run stays readable after its session has closed, until another run takes its
name or :func:`forget` lets it go.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import parse_qsl, urlsplit
from uuid import uuid4

from aggregator.catalogue import MergedStep
from aggregator.history.intake import Intake
from aggregator.history.layout import FORMAT, VERSION
from aggregator.history.memory import DEFAULT_CAPACITY, MemoryTables, Policy, RecentSteps
from aggregator.history.plan import TableReader
from telemetry.errors import (
    ConfigurationError,
    HistoryFullError,
    HistoryNotFoundError,
    HistoryWriteError,
    RankfoldError,
    RunDirectoryInUseError,
    RunDirectoryMissingRunError,
    SketchDescriptorMismatchError,
)
from telemetry.summary.histogram import HistogramDescriptor

__all__ = ["MemoryTarget", "MemoryWriter", "forget", "is_memory", "memory_source"]

_SCHEME: Final = "memory://"
_WHEN_FULL: Final = ("refuse", "drop_oldest", "coarsen")


def is_memory(to: str | os.PathLike[str]) -> bool:
    """Tell whether a destination is a run in memory."""
    return isinstance(to, str) and to.startswith(_SCHEME)


@dataclass(frozen=True)
class MemoryTarget:
    """A destination in memory, as it was written: its name, how many steps to keep, and what to do when they are."""

    name: str
    keep: int = DEFAULT_CAPACITY
    when_full: Policy = "refuse"

    @staticmethod
    def parse(to: str) -> MemoryTarget:
        """Read ``memory://NAME?keep=N&when_full=POLICY``; all parts are optional.

        Raises:
            ConfigurationError: something is none of these, or is there twice.
        """
        url = urlsplit(to)
        problem = "a path or a fragment" if url.path.strip("/") or url.fragment else ""
        options: dict[str, str] = {}
        try:
            for key, value in parse_qsl(url.query, keep_blank_values=True, strict_parsing=bool(url.query)):
                problem = problem or (f"{key!r} twice" if key in options else "")
                options[key] = value
        except ValueError:
            problem = problem or f"the options {url.query!r}"
        keep, when_full = options.pop("keep", str(DEFAULT_CAPACITY)), options.pop("when_full", "refuse")
        if options:
            problem = problem or f"the option {next(iter(options))!r}"
        if not (keep.isascii() and keep.isdigit() and int(keep) >= 2):
            problem = problem or f"keep={keep!r}"
        if when_full not in _WHEN_FULL:
            problem = problem or f"when_full={when_full!r}"
        if problem:
            raise ConfigurationError(
                f"the destination {to!r} has {problem}",
                remedy=f"give {_SCHEME}NAME?keep=N&when_full=POLICY, with N of 2 or more steps, and one of "
                f"{', '.join(_WHEN_FULL)}",
            )
        return MemoryTarget(url.netloc, int(keep), cast(Policy, when_full))


@dataclass
class _MemoryRun:
    """One run by its name."""

    manifest: Mapping[str, Any]
    steps: RecentSteps
    num_segments: int = 0
    is_open: bool = True
    lock: threading.Lock = field(default_factory=threading.Lock)


_runs: dict[str, _MemoryRun] = {}
_runs_lock = threading.Lock()


def forget(name: str = "") -> None:
    """Let go of the run ``memory://NAME`` and its memory, if there is one."""
    with _runs_lock:
        _runs.pop(name, None)


def memory_source(to: str | os.PathLike[str]) -> tuple[TableReader, Mapping[str, Any]]:
    """Return what reads the run ``to``, and its manifest.

    Raises:
        HistoryNotFoundError: this process has no such run.
    """
    name = MemoryTarget.parse(str(to)).name
    run = _runs.get(name)
    if run is None:
        raise HistoryNotFoundError(
            f"this process holds no run {_SCHEME}{name}; it holds {sorted(map(_SCHEME.__add__, _runs)) or 'none'}",
            remedy="read it in the process that writes it, which is that of rank zero",
        )
    return MemoryTables(Path(f"{_SCHEME}{name}"), run.steps), run.manifest


class MemoryWriter:
    """Writes one segment of a run in memory; a step is as durable as the process is, at once.

    Attributes:
        run_id, segment, resume_step: as for :class:`aggregator.history.HistoryWriter`.
        num_commits: steps taken in this segment.
        failure: why no further step can be taken, None while one can: a run under ``refuse`` says so as soon as it is
            full, so that nothing of the next step is observed in vain.
    """

    def __init__(self, name: str, run: _MemoryRun, record: Mapping[str, Any]) -> None:
        self.run_id: str = run.manifest["run_id"]
        self.segment: int = record["segment"]
        self.resume_step: int | None = record["resume_step"]
        self.num_commits = 0
        self.failure: RankfoldError | None = None
        self._name, self._run = name, run
        self._intake = Intake(self.segment, self.resume_step)
        run.steps.begin_segment(self.segment, record)
        run.num_segments += 1
        run.is_open = True

    @staticmethod
    def create(
        to: str, run: Mapping[str, Any], descriptor: HistogramDescriptor, resume_step: int | None = None
    ) -> MemoryWriter:
        """Begin a run under a name, in place of one that has ended, or continue it with a new segment.

        Args:
            to: see :class:`MemoryTarget`; a run that is continued keeps its own options.
            run, descriptor, resume_step: see :meth:`aggregator.history.HistoryWriter.create`.

        Raises:
            ConfigurationError: ``to`` is malformed.
            RunDirectoryInUseError: a session of this process still writes the run of this name.
            RunDirectoryMissingRunError: ``resume_step`` is given, and there is none.
            SketchDescriptorMismatchError: the run that is there counts on another grid.
        """
        target = MemoryTarget.parse(to)
        with _runs_lock:
            there = _runs.get(target.name)
            if there is not None and there.is_open:
                raise RunDirectoryInUseError(
                    f"{_SCHEME}{target.name} is being written by another session of this process",
                    remedy=f"close that session, or give a name of its own: {_SCHEME}NAME",
                )
            if resume_step is None:
                steps = RecentSteps(target.keep, target.when_full)
                there = _runs[target.name] = _MemoryRun(_manifest(run, descriptor), steps)
            elif there is None:
                raise RunDirectoryMissingRunError(
                    f"resume_step={resume_step} was given, but this process holds no run {_SCHEME}{target.name}",
                    remedy="leave resume_step out to begin a new run; what was in memory went with its process",
                )
            elif there.manifest["descriptor"] != descriptor.to_wire():
                raise SketchDescriptorMismatchError(
                    f"the run {_SCHEME}{target.name} counts histograms on another grid than {descriptor}",
                    remedy="continue with the descriptor of the run, or choose another name",
                )
            return MemoryWriter(target.name, there, _record(there.num_segments, resume_step, run))

    def append(self, step: MergedStep) -> Future[MergedStep]:
        """Take a step; the future that is returned is resolved.

        Raises:
            StepOrderError: the step is not after the last one, or before the start of the segment; nothing changes.
            HistoryFullError, HistoryWriteError: :attr:`failure`.
        """
        if self.failure is not None:
            raise self.failure
        self._run.steps.add(step.step, self._intake.take(step))
        self.num_commits += 1
        if self._run.steps.is_full:
            self.failure = _full(self._run.steps, step.step)
        acknowledgement: Future[MergedStep] = Future()
        acknowledgement.set_result(step)
        return acknowledgement

    def flush(self) -> None:
        """Do nothing: no step waits."""

    def close(self) -> None:
        """Seal the segment; the run stays readable."""
        self._run.steps.seal()
        self._run.is_open = False

    def next_segment(self, run: Mapping[str, Any], descriptor: HistogramDescriptor, resume_step: int) -> MemoryWriter:
        """Seal this segment and begin the next one; see :meth:`aggregator.history.HistoryWriter.next_segment`."""
        if self.failure is not None:
            raise self.failure
        self.close()
        return MemoryWriter(self._name, self._run, _record(self._run.num_segments, resume_step, run))

    def abandon(self) -> None:
        """End without sealing; what was taken stays readable, nothing can be added."""
        self.failure = self.failure or HistoryWriteError(f"the writer of segment {self.segment} was abandoned")
        self._run.is_open = False

    def withdraw(self) -> None:
        """Take the claim back, for an attach that was refused elsewhere; only before the first step."""
        assert self.num_commits == 0, "a segment with steps is never taken back"
        if self._run.num_segments == 1:
            forget(self._name)


def _full(steps: RecentSteps, step: int) -> HistoryFullError:
    return HistoryFullError(
        f"{len(steps)} steps are in memory, as many as were allowed, and the run has no directory: no step that is due "
        f"after step {step} is recorded",
        step=step,
        remedy="give a directory as `to`, log less often with a larger `every`, allow more with "
        f"{_SCHEME}NAME?keep=N, or choose when_full=drop_oldest or when_full=coarsen",
    )


def _manifest(run: Mapping[str, Any], descriptor: HistogramDescriptor) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "run_id": uuid4().hex,
        "created_unix_s": time.time(),
        "run": run,
        "descriptor": descriptor.to_wire(),
    }


def _record(number: int, resume_step: int | None, run: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "segment": number,
        "uuid": uuid4().hex,
        "parent": number - 1 if number else None,
        "resume_step": resume_step,
        "started_unix_s": time.time(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "run": run,
    }
