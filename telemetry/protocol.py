"""How a session reaches what is behind the packet: one small protocol, found through an entry point.

``telemetry`` never imports an aggregator. ``to="runs/exp1"`` asks the entry point ``collective`` of the group
``rankfold.aggregators``; ``to="ray://NAME"`` asks ``ray``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Final, Protocol

from telemetry.errors import AggregatorUnavailableError, RankfoldError
from telemetry.packet import Packet
from telemetry.sites import SiteSpec
from telemetry.summary.histogram import HistogramDescriptor

__all__ = [
    "ENTRY_POINT_GROUP",
    "Aggregator",
    "AttachOffer",
    "AttachReply",
    "CloseReport",
    "Deadlines",
    "SinkReport",
    "load_aggregator",
]

ENTRY_POINT_GROUP: Final = "rankfold.aggregators"


@dataclass(frozen=True)
class Deadlines:
    """How long to wait for other ranks, in seconds.

    Attributes:
        attach_s: for every rank to come to ``watch``.
        merge_s: for every rank to deliver a logged step after this one has.
        close_s: for the steps in flight and the sinks at close.
    """

    attach_s: float = 300.0
    merge_s: float = 300.0
    close_s: float = 60.0


@dataclass(frozen=True)
class AttachOffer:
    """What one rank brings to the agreement at attach.

    Attributes:
        rank, world_size: of this process.
        to: the destination as the user gave it.
        run: the run record, JSON-serialisable; rank zero's is stored.
        descriptor: histogram grid.
        sites: sites known before the first step.
        sinks: sink objects, inert; opened where the record is written and nowhere else.
        resume_step: first step of the segment that continues an existing run, or None for a new run.
        deadlines: see :class:`Deadlines`.
        failure: what this rank refuses for; every rank then raises it.
        cadence: all that decides which steps are logged, JSON-serialisable; has to be equal on all ranks.
        disabled_by: (rank,) if the kill switch is set in this process. One such rank is enough: then every rank is
            disabled, nothing is refused, no sink is opened, and ``run`` is stored with the ranks that said so.
        health: built-in checks of the merged steps: True, False, or the ``aggregator.health.Thresholds`` to use.
    """

    rank: int
    world_size: int
    to: str
    run: Mapping[str, Any]
    descriptor: HistogramDescriptor
    sites: tuple[SiteSpec, ...] = ()
    sinks: tuple[Any, ...] = ()
    resume_step: int | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)
    failure: RankfoldError | None = None
    cadence: Mapping[str, Any] = field(default_factory=dict)
    disabled_by: Sequence[int] = ()
    health: Any = True


@dataclass(frozen=True)
class AttachReply:
    """What every rank has agreed on: the run and the segment that this attempt writes.

    Attributes:
        run_id, segment: of the record.
        disabled_by: some of the ranks whose kill switch has turned the session off on all ranks; mostly empty.
        unrecorded: why such a session could not even write its run record, or "".
    """

    run_id: str
    segment: int
    disabled_by: Sequence[int] = ()
    unrecorded: str = ""


@dataclass(frozen=True)
class SinkReport:
    """What one sink did.

    Attributes:
        name: of the sink.
        state: ``ok``, ``late`` (still working when the run closed) or ``failed``.
        num_emitted, num_dropped: steps that it took, and steps that it missed.
        detail: where it is late or has failed, and why.
        observations: what became of every scheduled observation of these steps: presence → how many were shown with it,
            ``dropped`` → how many were lost, ``waiting`` → how many a late sink still has to take.
        disclosures: what a reader of the tracker would otherwise not know, such as names that had to be changed.
    """

    name: str
    state: str
    num_emitted: int
    num_dropped: int
    detail: str = ""
    observations: Mapping[str, int] = field(default_factory=dict)
    disclosures: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [f"{count} {what}" for what, count in self.observations.items()]
        dropped = f", {self.num_dropped} dropped" if self.num_dropped else ""
        told = f" ({', '.join(rows)})" if rows else ""
        return f"sink {self.name}: {self.state}, {self.num_emitted} steps{dropped}{told} {self.detail}".rstrip()


@dataclass(frozen=True)
class CloseReport:
    """What became of the steps that a rank submitted; equal on all ranks that reached the close together.

    Attributes:
        num_committed: logged steps in the record.
        last_committed_step: the newest of them, None if there is none.
        num_partial: of them, those that some rank is missing from.
        num_abstained: packets that ranks had to drop because too many steps were in flight.
        missing_ranks: ranks that were missing when the merge ended.
        failure: why the merge ended early, or None.
        sinks: one entry for each sink, on the rank that writes.
        findings: what the merge found, each different finding once: JSON objects with ``code``, ``message``, ``count``
            (steps it was made at) and ``last_step``.
    """

    num_committed: int = 0
    last_committed_step: int | None = None
    num_partial: int = 0
    num_abstained: int = 0
    missing_ranks: tuple[int, ...] = ()
    failure: RankfoldError | None = None
    sinks: tuple[SinkReport, ...] = ()
    findings: tuple[Mapping[str, Any], ...] = ()


class Aggregator(Protocol):
    """Takes packets from one rank and makes the merged record of all.

    A session calls :meth:`attach` once, :meth:`submit` for each logged step in ascending order, and :meth:`close`
    once, all from the training thread of every rank.
    """

    def attach(self, offer: AttachOffer) -> AttachReply:
        """Agree with all ranks, or raise the same error on all of them; waits at most ``offer.deadlines.attach_s``.

        Called even when this rank has already refused (``offer.failure``), so that no other rank is left waiting.
        """
        ...

    def submit(self, packet: Packet) -> None:
        """Hand over a logged step. Returns at once; never raises, whatever became of the merge."""
        ...

    @property
    def failure(self) -> RankfoldError | None:
        """Why merging has stopped, or None while it runs; a session stops observing then."""
        ...

    def close(self) -> CloseReport:
        """Deliver what is in flight within ``close_s``, end threads and connections, and account for the steps."""
        ...


def load_aggregator(to: str) -> Aggregator:
    """Make the aggregator that serves the destination ``to``.

    Raises:
        AggregatorUnavailableError: none is registered for its scheme.
    """
    scheme = to.partition("://")[0] if "://" in to else "collective"
    found: Sequence[Any] = tuple(entry_points(group=ENTRY_POINT_GROUP, name=scheme))
    if not found:
        known = sorted(point.name for point in entry_points(group=ENTRY_POINT_GROUP))
        raise AggregatorUnavailableError(
            f"nothing serves the destination {to!r}; there are aggregators for {known or 'nothing'}",
            remedy="give a directory, or install the package that provides this scheme"
            if known
            else "Rankfold is not installed in this environment: pip install rankfold",
        )
    factory = found[0].load()
    made: Aggregator = factory()
    return made
