"""What a sink is: the small protocol between a merged step and whatever shows or stores it elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

from aggregator.catalogue import MergedStep
from telemetry.sites import SiteSpec
from telemetry.summary.histogram import HistogramDescriptor

__all__ = ["CAPABILITIES", "ExactingSink", "RunInfo", "RunPlan", "Sink"]

CAPABILITIES: Final = frozenset({"scalar", "raw_histogram", "text", "image", "structured_event", "run_metadata"})
"""All words there are for what a sink carries: numbers; the counts of a histogram, unchanged; prose; pictures; a
finding or an observation with its structure; and what a run says of itself."""


@dataclass(frozen=True)
class RunInfo:
    """What a sink learns when it is opened.

    Attributes:
        run_id: the same for all segments of a run.
        segment: number of this attempt.
        resume_step: first step of an attempt that continues a run; what a sink shows from this step on is superseded.
        world_size: number of ranks.
        descriptor: grid of the histograms.
        run: the run record, JSON-serialisable.
    """

    run_id: str
    segment: int
    resume_step: int | None
    world_size: int
    descriptor: HistogramDescriptor
    run: Mapping[str, Any]

    def to_record(self) -> dict[str, Any]:
        """Return what a tracker keeps about the run, JSON-serialisable."""
        return {
            "run_id": self.run_id,
            "segment": self.segment,
            "resume_step": self.resume_step,
            "world_size": self.world_size,
            "descriptor": self.descriptor.to_wire(),
            "run": dict(self.run),
        }


@dataclass(frozen=True)
class RunPlan:
    """What a run is going to ask of its sinks, as far as that is known at attach.

    Attributes:
        sites: those of all ranks that are known before the first step; more may come with any step.
        descriptor: grid of the histograms.
    """

    sites: Sequence[SiteSpec]
    descriptor: HistogramDescriptor


@runtime_checkable
class Sink(Protocol):
    """Receives every committed step, on the rank that writes the record and nowhere else.

    The constructor runs on all ranks and must stay inert: no file, no connection, no thread; the object pickles until
    it is opened. The other calls come from one thread that belongs to this sink alone: :meth:`open` once, then
    :meth:`emit` in ascending order of steps within a segment, :meth:`flush` when the sink has caught up, :meth:`close`
    once. A call may raise: the sink then counts as failed and gets no further call but ``close``; training and other
    sinks go on. A call may block for as long as it likes, which delays nobody else.

    A sink may also have a method ``begin_segment(run: RunInfo)``. It is called between two steps when the run continues
    with a new segment inside of one process: steps from ``run.resume_step`` on come again, and what the sink has shown
    of them is superseded, as for an attempt that is opened with a ``resume_step``.

    A new sink is one class and one subclass of ``aggregator.testing.SinkContract``.
    """

    @property
    def name(self) -> str:
        """What reports call this sink."""
        ...

    @property
    def capabilities(self) -> frozenset[str]:
        """Which of ``CAPABILITIES`` it carries; what it lacks it leaves out without raising."""
        ...

    def open(self, run: RunInfo) -> None:
        """Acquire what is needed."""
        ...

    def emit(self, step: MergedStep) -> None:
        """Take one step; must not change it."""
        ...

    def flush(self) -> None:
        """Make what was emitted visible."""
        ...

    def close(self) -> None:
        """Finish and release; called even if :meth:`open` or :meth:`emit` raised."""
        ...


@runtime_checkable
class ExactingSink(Sink, Protocol):
    """A sink that can refuse a run at attach, or has to say what it changed or left out. A plain sink need not."""

    @property
    def wanted(self) -> frozenset[str]:
        """Capabilities that the user asked this object for; if ``capabilities`` lacks one, ``watch`` refuses."""
        ...

    def admit(self, plan: RunPlan) -> None:
        """Raise a ``ConfigurationError`` if the run cannot be shown. Called once, on the rank that writes the record,
        before anything is written or opened; every rank then raises the error."""
        ...

    @property
    def disclosures(self) -> Sequence[str]:
        """Sentences for the close report: what a reader of the tracker would otherwise not know."""
        ...
