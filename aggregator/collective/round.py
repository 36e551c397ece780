"""One meeting of a rank with its children: what each of them brought, and what the subtree makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aggregator.collective.absence import merge_stopped
from aggregator.collective.frames import Frame, FrameKind, missing_from_wire, missing_to_wire
from aggregator.collective.tree import TreePosition
from aggregator.merge import merge_packets
from telemetry.errors import PacketMalformedError, PeerLostError, RankfoldError
from telemetry.packet import Packet

__all__ = ["Absent", "Brought", "Closed", "Contribution", "Outcome", "merge_round"]


@dataclass(frozen=True)
class Brought:
    """A source brought a step, merged over all ranks that it speaks for.

    Attributes:
        packet: of the ranks that came.
        missing: rank → reason, those of the subtree that did not.
        error: why merging must stop after this step, or None.
        came_at: when the first of its parts came to the rank that merges, in seconds of that member's clock.
    """

    packet: Packet
    missing: Mapping[int, str] = field(default_factory=dict)
    error: RankfoldError | None = None
    came_at: float = 0.0

    @property
    def key(self) -> tuple[str, int, int]:
        """What must be equal for two packets to be one step."""
        return self.packet.run_id, self.packet.segment, self.packet.step

    def to_frame(self) -> Frame:
        """Return the frame that goes to the parent."""
        return Frame(FrameKind.STEP, _to_body(self.missing, self.error), self.packet.to_bytes())

    @staticmethod
    def from_frame(frame: Frame, came_at: float) -> Brought:
        """Undo :meth:`to_frame`, for the rank that it came to."""
        return Brought(Packet.from_bytes(frame.packet), *_from_body(frame), came_at)


@dataclass(frozen=True)
class Closed:
    """A source closed: no step comes from it any more. ``missing`` and ``error`` as in :class:`Brought`."""

    missing: Mapping[int, str] = field(default_factory=dict)
    error: RankfoldError | None = None

    def to_frame(self) -> Frame:
        """Return the frame that goes to the parent."""
        return Frame(FrameKind.CLOSE, _to_body(self.missing, self.error))

    @staticmethod
    def from_frame(frame: Frame) -> Closed:
        """Undo :meth:`to_frame`."""
        return Closed(*_from_body(frame))


@dataclass(frozen=True)
class Absent:
    """A source is lost, late or has refused; ``error`` says which, ``reason`` says it of each rank behind it."""

    reason: str
    error: RankfoldError


Contribution = Brought | Closed | Absent
Outcome = Brought | Closed


def merge_round(position: TreePosition, contributions: Mapping[int, Contribution]) -> Outcome:
    """Fold what a rank and its children brought: its own first, then the children in rank order.

    Args:
        position: the rank that folds.
        contributions: one for the rank itself and for each of its children.

    Returns:
        ``Brought`` if any source brought a step: the step of the first such source counts, one that brought another
        step or closed is missing from it. ``Closed`` if all that are left have closed.

    Raises:
        RankfoldError: the packets do not merge.
    """
    sources = (position.rank, *position.children)
    brought = {source: c for source in sources if isinstance(c := contributions[source], Brought)}
    lead = next(iter(brought.values()), None)
    missing: dict[int, str] = {}
    errors: list[RankfoldError] = []
    for source in sources:
        told = _judge(source, contributions[source], lead)
        if isinstance(told, Absent):
            ranks = (source,) if source == position.rank else position.below[source]
            missing.update(dict.fromkeys(ranks, told.reason))
            errors.append(told.error)
            brought.pop(source, None)
        else:
            missing.update(told.missing)
            errors.extend([told.error] if told.error else [])
    error = merge_stopped(errors, missing, lead.packet.step if lead else None)
    if lead is None:
        return Closed(missing, error)
    packets, first_came_at = [b.packet for b in brought.values()], min(b.came_at for b in brought.values())
    return Brought(merge_packets(packets), missing, error, first_came_at)


def _judge(source: int, contribution: Contribution, lead: Brought | None) -> Contribution:
    """Turn what does not fit the step of ``lead`` into an absence."""
    if lead is None or isinstance(contribution, Absent):
        return contribution
    if isinstance(contribution, Closed):
        text = f"left before step {lead.packet.step}: it had closed its session"
        return Absent(text, PeerLostError(text, rank=source, step=lead.packet.step))
    if contribution.key != lead.key:
        return _another_step(contribution.packet, lead.packet)
    return contribution


def _another_step(packet: Packet, lead: Packet) -> Absent:
    brought = f"run {packet.run_id} segment {packet.segment} step {packet.step}"
    expected = f"run {lead.run_id} segment {lead.segment} step {lead.step}"
    return Absent(
        f"brought {brought}",
        PacketMalformedError(
            f"ranks {list(packet.ranks)} brought {brought}, ranks {list(lead.ranks)} {expected}",
            step=lead.step,
            failures={**dict.fromkeys(packet.ranks, f"brought {brought}")},
            remedy="every rank must log the same steps: open session.step with the same number on all of them",
        ),
    )


def _to_body(missing: Mapping[int, str], error: RankfoldError | None) -> dict[str, object]:
    if not missing and error is None:
        return {}
    return {"missing": missing_to_wire(missing), "error": error and error.to_wire()}


def _from_body(frame: Frame) -> tuple[dict[int, str], RankfoldError | None]:
    error = frame.body.get("error")
    return missing_from_wire(frame.body.get("missing", [])), error and RankfoldError.from_wire(error)
