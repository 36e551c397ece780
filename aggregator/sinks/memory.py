"""A sink that keeps the steps in this process, for notebooks and tests."""

from __future__ import annotations

from aggregator.catalogue import MergedStep
from aggregator.sinks.protocol import CAPABILITIES, RunInfo

__all__ = ["MemorySink"]


class MemorySink:
    """Keeps every step it is given.

    Attributes:
        run: what the sink was opened with, None before.
        steps: the steps, in order.
        closed: whether the run is over.
    """

    name = "memory"
    capabilities = CAPABILITIES - {"image"}

    def __init__(self) -> None:
        self.run: RunInfo | None = None
        self.steps: list[MergedStep] = []
        self.closed = False

    def open(self, run: RunInfo) -> None:
        """Remember the run."""
        self.run = run

    def emit(self, step: MergedStep) -> None:
        """Keep a step."""
        self.steps.append(step)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Mark the end."""
        self.closed = True
