"""What the merge needs of whoever writes the record. Only rank zero has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from aggregator.catalogue import MergedStep
from telemetry.protocol import AttachOffer, AttachReply, SinkReport

__all__ = ["RecorderFactory", "StepRecorder", "default_recorder"]


class StepRecorder(Protocol):
    """Writes merged steps. Made and called on rank zero only, always on the merging thread, in this order:

    1. :meth:`claim` once; 2. :meth:`commit` for each merged step, ascending; 3. :meth:`close` once.
    :meth:`abort` replaces what is left of it after an error.
    """

    def claim(self, offer: AttachOffer) -> AttachReply:
        """Take possession of ``offer.to`` for one segment; ``offer.sites`` are those of all ranks.

        Raises:
            RankfoldError: the destination cannot be used; every rank raises it from ``watch``.
        """
        ...

    def commit(self, step: MergedStep) -> MergedStep:
        """Write one step; it is durable on return. An exception ends the merge on all ranks.

        Returns:
            The step as it was written: the recorder may add findings.
        """
        ...

    def close(self, deadline_s: float) -> tuple[SinkReport, ...]:
        """Finish sinks and files within ``deadline_s`` seconds and account for the sinks."""
        ...

    def abort(self) -> None:
        """Let go of everything at once; what was committed stays."""
        ...


RecorderFactory = Callable[[], StepRecorder]


def default_recorder() -> StepRecorder:
    """Make the recorder of run directories; imported here so that other ranks never load it."""
    from aggregator.recorder import Recorder

    return Recorder()
