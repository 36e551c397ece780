"""Steps that ranks have brought and nobody has written yet; decides what each packet is, and when a step is due.

Deliveries repeat, overtake each other and come late. A step is written once, in ascending order: when every rank that
it waits for has brought it, or at its deadline. What is durable is remembered for a while, so that a packet that comes
again is answered and not counted again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from aggregator.ray_actor.membership import Membership, StepKey
from telemetry.packet import Packet

__all__ = ["Arrival", "PendingStep", "Window"]

# Steps whose absent ranks are remembered after they became durable; what is still under way is far younger.
_REMEMBERED: Final = 4096


class Arrival(Enum):
    """What a packet turned out to be."""

    NEW = "new"
    REPEATED = "repeated"
    DURABLE = "durable"
    LATE = "late"
    CROSSING = "crossing"


@dataclass
class PendingStep:
    """One step on its way into the record.

    Attributes:
        key: its segment and number.
        since: when it was first heard of, monotonic seconds.
        parts: packets of ranks that do not overlap.
        acks: whoever waits for it to become durable, as given to :meth:`Window.add`.
        missing: rank → reason, filled in when the step is due.
    """

    key: StepKey
    since: float
    parts: list[Packet] = field(default_factory=list)
    acks: list[Any] = field(default_factory=list)
    missing: dict[int, str] = field(default_factory=dict)

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks that are there."""
        return frozenset(rank for part in self.parts for rank in part.ranks)


class Window:
    """The pending steps of one attempt. Used by one thread at a time; time is passed in.

    Args:
        members: whom steps wait for.
        wait_s: longest wait of a step, in seconds.
        durable: step → ranks that are absent from it, for what an earlier incarnation has written.
    """

    def __init__(
        self, members: Membership, wait_s: float, durable: Mapping[StepKey, frozenset[int]] | None = None
    ) -> None:
        self._members = members
        self._wait_s = wait_s
        self._pending: dict[StepKey, PendingStep] = {}
        self._writing: dict[StepKey, PendingStep] = {}
        self._durable: OrderedDict[StepKey, frozenset[int]] = OrderedDict(
            sorted((durable or {}).items())[-_REMEMBERED:]
        )
        self._handed = max(self._durable, default=None)
        self._hurry_at = float("inf")
        self.num_repeated = 0
        self.num_late = 0

    @property
    def num_pending(self) -> int:
        """Steps that are not due yet."""
        return len(self._pending)

    @property
    def num_writing(self) -> int:
        """Steps that were due and are not durable yet."""
        return len(self._writing)

    @property
    def newest(self) -> StepKey | None:
        """The highest step that anybody has brought or announced."""
        return max((*self._pending, *([] if self._handed is None else [self._handed])), default=None)

    @property
    def num_parts(self) -> int:
        """Packets that are held."""
        return sum(len(step.parts) for steps in (self._pending, self._writing) for step in steps.values())

    def oldest_wait_s(self, now: float) -> float:
        """Return how long the oldest pending step has been waiting, in seconds."""
        return max((now - step.since for step in self._pending.values()), default=0.0)

    def add(self, packet: Packet, previous: StepKey | None, ack: Any, now: float) -> Arrival:
        """Take a packet in.

        Args:
            packet: of one rank, or of several that a relay has merged.
            previous: the step that its sender had sent before; it is under way if it is not here yet.
            ack: kept with the step if the packet has to wait for it (``NEW``, ``REPEATED``).
            now: monotonic seconds.
        """
        ranks, step = frozenset(packet.ranks), (packet.segment, packet.step)
        if previous is not None:
            self.announce(previous, now)
        self._members.silent -= ranks
        if (absent := self._durable.get(step)) is not None and not ranks & absent:
            self.num_repeated += 1
            return Arrival.DURABLE
        known = self._pending.get(step) or self._writing.get(step)
        if known is not None and ranks <= known.ranks:
            self.num_repeated += 1
            known.acks.append(ack)
            return Arrival.REPEATED
        if self._handed is not None and step <= self._handed:
            self.num_late += 1
            return Arrival.LATE
        pending = self._pending.setdefault(step, PendingStep(step, now))
        return self._place(pending, packet, ranks, ack)

    def _place(self, pending: PendingStep, packet: Packet, ranks: frozenset[int], ack: Any) -> Arrival:
        inside = [part for part in pending.parts if ranks.issuperset(part.ranks)]
        outside = [part for part in pending.parts if not ranks.issuperset(part.ranks)]
        if any(ranks.intersection(part.ranks) for part in outside):
            return Arrival.CROSSING
        self.num_repeated += len(inside)
        pending.parts = [*outside, packet]
        pending.acks.append(ack)
        return Arrival.NEW

    def announce(self, step: StepKey, now: float) -> None:
        """Wait for a step that is known to be under way, so that later ones do not overtake it."""
        is_past = self._handed is not None and step <= self._handed
        if not is_past and step not in self._pending:
            self._pending[step] = PendingStep(step, now)

    def pop_due(self, now: float) -> list[PendingStep]:
        """Take the steps that need not wait any longer, ascending; the ranks they lack fall silent."""
        due: list[PendingStep] = []
        while self._pending:
            pending = self._pending[min(self._pending)]
            late = self._members.awaited(pending.key) - pending.ranks
            is_over = now >= min(pending.since + self._wait_s, self._hurry_at)
            if (late or not pending.parts) and not is_over:
                break
            del self._pending[pending.key]
            self._hand(pending, late, now)
            if pending.parts:
                self._writing[pending.key] = pending
                due.append(pending)
        return due

    def _hand(self, pending: PendingStep, late: frozenset[int], now: float) -> None:
        waited = f"brought nothing within {now - pending.since:.3g} s"
        for rank in sorted(self._members.expected(pending.key) - pending.ranks):
            pending.missing[rank] = waited if rank in late else "has brought nothing since an earlier step"
        # Nobody falls silent for a step that was announced and never came.
        if pending.parts:
            self._members.silent |= late
        self._handed = pending.key if self._handed is None else max(self._handed, pending.key)

    def settle(self, step: StepKey, absent: Iterable[int]) -> list[Any]:
        """Note that a step is durable without ``absent``, and return who waits for it."""
        self._durable[step] = frozenset(absent)
        while len(self._durable) > _REMEMBERED:
            self._durable.popitem(last=False)
        written = self._writing.pop(step, None)
        return written.acks if written else []

    def drop_all(self) -> list[Any]:
        """Forget what is pending and return who waits for it: nothing more will be written."""
        dropped = [*self._pending.values(), *self._writing.values()]
        self._pending.clear()
        self._writing.clear()
        return [ack for step in dropped for ack in step.acks]

    def next_deadline(self) -> float:
        """Return when the next step is due if nothing comes, infinity if nothing is pending."""
        if not self._pending:
            return float("inf")
        return min(self._pending[min(self._pending)].since + self._wait_s, self._hurry_at)

    def hurry(self, at: float) -> None:
        """Let no step wait beyond ``at``, monotonic seconds; infinity takes it back."""
        self._hurry_at = at
