"""Where a run is recorded: a directory, or the memory of this process. Both are written through one small protocol."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from aggregator.catalogue import MergedStep
from aggregator.history.group import GroupCommit
from aggregator.history.memory_run import MemoryWriter, is_memory
from aggregator.history.writer import HistoryWriter
from telemetry.errors import RankfoldError
from telemetry.summary.histogram import HistogramDescriptor

__all__ = ["SegmentWriter", "open_destination"]


class SegmentWriter(Protocol):
    """Writes one segment of a run; see :class:`aggregator.history.HistoryWriter` for what each part promises."""

    @property
    def run_id(self) -> str:
        """The same for all segments of a run."""
        ...

    @property
    def segment(self) -> int:
        """Number of this attempt."""
        ...

    @property
    def resume_step(self) -> int | None:
        """First step of a segment that continues a run, else None."""
        ...

    @property
    def num_commits(self) -> int:
        """Steps in the record of this segment."""
        ...

    @property
    def failure(self) -> RankfoldError | None:
        """Why no further step can be taken, None while one can."""
        ...

    def append(self, step: MergedStep) -> Future[MergedStep]:
        """Take a step; resolved when it is in the record."""
        ...

    def flush(self) -> None:
        """Put into the record what was appended."""
        ...

    def close(self) -> None:
        """Flush and seal."""
        ...

    def next_segment(self, run: Mapping[str, Any], descriptor: HistogramDescriptor, resume_step: int) -> SegmentWriter:
        """Close, and begin the next segment of the run."""
        ...

    def withdraw(self) -> None:
        """Take the claim back, before the first step."""
        ...

    def abandon(self) -> None:
        """Stop without sealing."""
        ...


def open_destination(
    to: str,
    run: Mapping[str, Any],
    descriptor: HistogramDescriptor,
    resume_step: int | None,
    group: GroupCommit | None = None,
    after: int | None = None,
) -> SegmentWriter:
    """Begin or continue the run that ``to`` names.

    Args:
        to: a directory, or ``memory://NAME?keep=N&when_full=POLICY``.
        run, descriptor, resume_step, group, after: see :meth:`aggregator.history.HistoryWriter.create`.

    Raises:
        RankfoldError: see :meth:`aggregator.history.HistoryWriter.create` and ``MemoryWriter.create``.
    """
    if is_memory(to):
        return MemoryWriter.create(to, run, descriptor, resume_step)
    return HistoryWriter.create(Path(to), run, descriptor, resume_step, after=after, group=group)
