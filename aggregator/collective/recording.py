"""What the merge needs of whoever writes the record. Only rank zero has one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from aggregator.catalogue import MergedStep
from telemetry.errors import RankfoldError
from telemetry.protocol import AttachOffer, AttachReply, SinkReport

__all__ = ["RecorderFactory", "StepRecorder", "default_recorder"]


class StepRecorder(Protocol):
    """Writes merged steps, on rank zero only. Called on the merging thread, but for :meth:`guard`, in this order:

    1. :meth:`claim` once; 2. :meth:`append` for each merged step, ascending within a segment, :meth:`begin_segment`
    where the ranks go back to an earlier step, and :meth:`flush` where none may be pending any longer; 3. :meth:`close`
    once. :meth:`abort` replaces what is left of it after an error.
    """

    def claim(self, offer: AttachOffer) -> AttachReply:
        """Take possession of ``offer.to`` for one segment; ``offer.sites`` are those of all ranks.

        Raises:
            RankfoldError: the destination cannot be used; every rank raises it from ``watch``.
        """
        ...

    def guard(self) -> None:
        """Prepare for the end of the process by a signal; called by the training thread, after :meth:`claim`."""
        ...

    def append(self, step: MergedStep) -> Future[MergedStep]:
        """Take one step, to be durable soon: a later step may be appended before this one is. An exception ends the
        merge on all ranks.

        Returns:
            Resolved once the step is durable, with the step as it was written, because the recorder may add findings;
            or with the error that kept it from becoming durable. Resolved on any thread, in the order of steps.
        """
        ...

    def begin_segment(self, resume_step: int) -> int:
        """Make durable what was appended and continue the run with the next segment, which begins at ``resume_step``.

        Returns:
            Its number, one more than that of the last. An exception ends the merge on all ranks.
        """
        ...

    @property
    def failure(self) -> RankfoldError | None:
        """Why no further step can be appended, though those that were are fine; None while one can."""
        ...

    def flush(self) -> None:
        """Make durable at once what was appended; an exception ends the merge on all ranks."""
        ...

    def close(self, deadline_s: float) -> tuple[SinkReport, ...]:
        """Make durable what was appended, finish sinks and files within ``deadline_s`` s, and account for the sinks."""
        ...

    def abort(self) -> None:
        """Let go of everything at once; what is durable stays."""
        ...


RecorderFactory = Callable[[], StepRecorder]


def default_recorder() -> StepRecorder:
    """Make the recorder of run directories; imported here so that other ranks never load it."""
    from aggregator.recorder import Recorder

    return Recorder()
