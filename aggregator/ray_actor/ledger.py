"""The actor's end of the record: opens it, or takes it over from an earlier incarnation, and writes steps into it.

Unless said otherwise, calls come from the actor's writing thread, one at a time, because they touch the disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from aggregator.collective.account import Account
from aggregator.collective.record import Record
from aggregator.collective.recording import StepRecorder
from aggregator.collective.round import Brought
from aggregator.definitions import DefinedSite
from aggregator.merge import merge_packets
from aggregator.ray_actor.membership import StepKey
from aggregator.ray_actor.takeover import MARK, OwnRecord, SuccessorRecorder, last_mark, read_own_record
from aggregator.ray_actor.window import PendingStep
from aggregator.recorder import Recorder
from telemetry.errors import RankfoldError
from telemetry.packet import Packet
from telemetry.protocol import AttachOffer, AttachReply, CloseReport

__all__ = ["Ledger", "Mark", "Written"]


@dataclass(frozen=True)
class Mark:
    """Who writes, as the run record has it under ``ray``.

    Attributes:
        name: of the destination.
        attempt: nonce of the attempt, equal on all of its ranks and nowhere else.
        job: what the attempts of one job have in common where its launcher restarts it, or "".
        incarnation: nonce of this life of the actor.
        segment: the one that the incarnation goes on in, as the ranks count; None in the first.
    """

    name: str
    attempt: str
    job: str = ""
    incarnation: str = field(default_factory=lambda: uuid4().hex)
    segment: int | None = None


@dataclass(frozen=True)
class Written:
    """A step that is durable; ``absent`` are the ranks that it says are missing, without those that abstained."""

    key: StepKey
    absent: frozenset[int]


class Ledger:
    """The record of one attempt, as one incarnation writes it.

    Attributes:
        mark: who writes.
        own: what earlier incarnations have written, None in the first.
        reply: what the ranks were told at attach, None before.
    """

    def __init__(self, mark: Mark, wake: Callable[[], None] = lambda: None) -> None:
        """Open nothing yet.

        Args:
            mark: who writes.
            wake: called on any thread when it is time to :meth:`settle`.
        """
        self.mark = mark
        self.own: OwnRecord | None = None
        self.reply: AttachReply | None = None
        self._record = Record(self._make_recorder, wake)
        # Set while a takeover is put off, until there is something to write.
        self._unclaimed: tuple[AttachOffer, tuple[DefinedSite, ...]] | None = None
        # From a segment as the ranks count to its number in the directory.
        self._offset = 0
        self._appended: deque[Written] = deque()
        self._num_settled = 0
        self._notices: deque[Mapping[str, Any]] = deque()

    @property
    def account(self) -> Account:
        """The totals so far, over all incarnations."""
        return self.own.account if self.own and self._unclaimed else self._record.account

    def open(self, offer: AttachOffer, sites: Iterable[DefinedSite]) -> AttachReply:
        """Claim the run directory ``offer.to``, or find what an earlier incarnation of this attempt has there.

        Raises:
            RankfoldError: the directory cannot be used.
        """
        path = Path(offer.to)
        self.own = None if offer.disabled_by or not offer.to else read_own_record(path, self.mark.attempt)
        marked = replace(offer, run={**offer.run, MARK: vars(self.mark)})
        if self.own is None:
            self.reply = self._record.claim(self._of_restarted_job(marked), sites)
            return self.reply
        # Claimed with the first step: an actor that is killed again before that leaves no empty segment behind.
        self._unclaimed = marked, tuple(sites)
        first = self.own.first_segment
        if first is None:
            first = 0 if self.own.last_folder is None else self.own.last_folder + 1
            self.own = replace(self.own, segment=first)
        self.reply = AttachReply(self.own.run_id, first)
        return self.reply

    def _of_restarted_job(self, offer: AttachOffer) -> AttachOffer:
        """Begin anew from step 0 where the launcher has restarted a job that had written and has no checkpoint yet."""
        if offer.resume_step is not None or not self.mark.job or not offer.to:
            return offer
        is_restart = last_mark(Path(offer.to)).get("job") == self.mark.job
        return replace(offer, resume_step=0) if is_restart else offer

    def _make_recorder(self) -> StepRecorder:
        if self.own is None:
            return Recorder()
        return SuccessorRecorder(self.mark.attempt, lambda after: Recorder(after=after))

    def add_sites(self, sites: Iterable[DefinedSite]) -> None:
        """Take in the sites of a rank that came after the claim."""
        if self._unclaimed is not None:
            self._unclaimed = self._unclaimed[0], (*self._unclaimed[1], *sites)
        else:
            self._record.add_offered(sites)

    def notice(self, finding: Mapping[str, Any]) -> None:
        """Put a finding into the next step that is written; may be called from any thread."""
        self._notices.append(finding)

    def append(self, steps: Sequence[PendingStep], num_members: Sequence[int], now: float) -> list[Written]:
        """Write steps, ascending; see :meth:`settle` for what is returned.

        Args:
            steps: that are due.
            num_members: for each of them, how many ranks the job had then.
            now: seconds of the clock that ``PendingStep.since`` is of.

        Raises:
            RankfoldError: a step is not in the record; merging must stop.
        """
        self._claim_at_last()
        known = []
        for step, num in zip(steps, num_members, strict=True):
            if self.own is not None and (absent := self.own.durable.get(step.key)) is not None:
                known.append(Written(step.key, absent))
                continue
            packet = merge_packets(sorted(step.parts, key=lambda part: part.ranks[0]))
            self._appended.append(Written(step.key, frozenset(step.missing)))
            self._record.append(Brought(self._dressed(packet, num), step.missing), now - step.since)
        return [*known, *self.settle()]

    def _dressed(self, packet: Packet, num_members: int) -> Packet:
        notices = []
        while self._notices:
            notices.append({**self._notices.popleft(), "step": packet.step})
        findings = (*packet.findings, *notices)
        return replace(packet, segment=packet.segment + self._offset, world_size=num_members, findings=findings)

    def settle(self) -> list[Written]:
        """Return the steps that have become durable since the last call, in order.

        Raises:
            RankfoldError: a step did not become durable; merging must stop. What did is returned by :meth:`flush`.
        """
        self._record.settle()
        return self._pop_settled()

    def _pop_settled(self) -> list[Written]:
        num_new = self._record.account.num_committed - self._num_settled
        self._num_settled += num_new
        return [self._appended.popleft() for _ in range(num_new)]

    def flush(self) -> list[Written]:
        """Make durable what was appended, as far as that can be, and return it; never raises."""
        self._record.flush()
        return self._pop_settled()

    def _claim_at_last(self) -> None:
        if self._unclaimed is None:
            return
        offer, sites = self._unclaimed
        number = self._record.claim(offer, sites).segment
        self._unclaimed = None
        # The earlier incarnation is sealed now: this is all that it has made durable.
        self.own = read_own_record(Path(offer.to), self.mark.attempt)
        assert self.own is not None, "it was claimed a moment ago"
        self._offset = number - self.own.segment
        self._restore(self.own)

    def _restore(self, own: OwnRecord) -> None:
        self._record.restore(own.account, own.missing_ranks, own.findings)
        self._num_settled = own.account.num_committed

    def report(self, failure: RankfoldError | None) -> CloseReport:
        """Return the account so far, for a rank that leaves."""
        return self._record.report(failure)

    def close(
        self, deadline_s: float, failure: RankfoldError | None, missing: Iterable[int]
    ) -> tuple[CloseReport, list[Written]]:
        """Close the record; return the account of all incarnations, and what has become durable; never raises."""
        if self._unclaimed is not None and self.own is not None:
            failure = failure or self._seal(self._unclaimed[0])
            self._restore(self.own)
        report = self._record.close(deadline_s, failure, missing)
        return report, self._pop_settled()

    def _seal(self, offer: AttachOffer) -> RankfoldError | None:
        """Seal what the earlier incarnation left open: a claim does that, and is taken back."""
        recorder = self._make_recorder()
        try:
            recorder.claim(replace(offer, sinks=()))
        except RankfoldError as error:
            return error
        finally:
            recorder.abort()
        return None
