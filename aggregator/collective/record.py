"""Rank zero's end of the merge: a merged packet becomes a named step and goes to the recorder.

Appended is not yet durable. Only what the recorder has acknowledged is counted, and told to other ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from aggregator.catalogue import Catalogue, MergedStep
from aggregator.collective.account import Account
from aggregator.collective.recording import RecorderFactory, StepRecorder
from aggregator.collective.round import Brought
from aggregator.definitions import DefinedSite, defined_sites, join_definitions
from aggregator.findings import FindingLog
from aggregator.sinks.admission import admit_sinks
from aggregator.sinks.protocol import RunPlan
from telemetry.errors import HistoryError, PacketMalformedError, RankfoldError
from telemetry.packet import Packet
from telemetry.protocol import AttachOffer, AttachReply, CloseReport, SinkReport

__all__ = ["Record"]


class Record:
    """The record of one attempt, from claim to close. Rank zero, merging thread, but for :meth:`guard`.

    Attributes:
        account: totals of the steps that are durable.
    """

    def __init__(self, factory: RecorderFactory, wake: Callable[[], None]) -> None:
        """Make no recorder yet: a refusal at attach must leave no trace on disk.

        Args:
            factory: makes the recorder.
            wake: called on any thread when it is time to :meth:`settle`.
        """
        self._factory, self._wake = factory, wake
        self._unsettled: deque[Future[MergedStep]] = deque()
        self._recorder: StepRecorder | None = None
        self._segment = 0
        self._catalogue = Catalogue()
        self._offered: dict[int, DefinedSite] = {}
        self._missing: set[int] = set()
        self._findings = FindingLog()
        self.account = Account()

    def claim(self, offer: AttachOffer, sites: Iterable[DefinedSite]) -> AttachReply:
        """Open the record with the sites of all ranks.

        Raises:
            RankfoldError: a sink or the recorder refuses.
        """
        self._offered = {site.site_id: (site, ranks) for site, ranks in sites}
        offer = replace(offer, sites=tuple(site for site, _ in self._offered.values()))
        if not offer.disabled_by:
            admit_sinks(offer.sinks, RunPlan(offer.sites, offer.descriptor))
        recorder = self._factory()
        try:
            reply = recorder.claim(offer)
        except BaseException:
            recorder.abort()
            raise
        self._recorder, self._segment = recorder, reply.segment
        return reply

    def guard(self) -> None:
        """Prepare for the end of the process by a signal. Training thread, after a claim."""
        assert self._recorder is not None, "attach claims before the session begins"
        self._recorder.guard()

    def restore(self, account: Account, missing: Iterable[int], findings: Iterable[Mapping[str, Any]]) -> None:
        """Go on from the totals of an earlier process that wrote this record; before any step."""
        self.account = account
        self._missing.update(missing)
        self._findings.add(findings, show=False)

    def add_offered(self, sites: Iterable[DefinedSite]) -> None:
        """Take in the sites of a rank that came after the claim."""
        for site, ranks in sites:
            self._offered.setdefault(site.site_id, (site, ranks))

    def append(self, outcome: Brought, merge_s: float) -> None:
        """Hand one step to the recorder, whose merge took ``merge_s`` seconds.

        Raises:
            RankfoldError: this step, one before it, or any further one cannot be in the record; merging must stop.
        """
        assert self._recorder is not None, "attach claims before any step"
        self._missing.update(outcome.missing)
        step = MergedStep.resolve(self._with_definitions(outcome.packet), self._catalogue, outcome.missing, merge_s)
        with _writing(step.step):
            self._follow_segment(outcome.packet, self._recorder)
            acknowledgement = self._recorder.append(step)
        self._unsettled.append(acknowledgement)
        self.settle()
        if not acknowledgement.done():
            acknowledgement.add_done_callback(lambda _: self._wake())
        if (failure := self._recorder.failure) is not None:
            raise failure

    def _follow_segment(self, packet: Packet, recorder: StepRecorder) -> None:
        """Begin the segment that the ranks have begun; more than one, if nothing was logged in those between."""
        while packet.segment > self._segment:
            if packet.resume_step is None:
                raise PacketMalformedError(
                    f"the step belongs to segment {packet.segment} and does not say where that begins",
                    step=packet.step,
                )
            self._segment = recorder.begin_segment(packet.resume_step)

    @property
    def is_settled(self) -> bool:
        """Whether all that was appended is durable and counted."""
        return not self._unsettled

    def settle(self) -> None:
        """Count what has become durable.

        Raises:
            RankfoldError: a step did not; merging must stop.
        """
        while self._unsettled and self._unsettled[0].done():
            with _writing(None):
                step = self._unsettled.popleft().result()
            self._findings.add(step.packet.findings)
            self.account = self.account.with_step(
                step.step, is_partial=step.is_partial, num_abstained=len(step.packet.abstained)
            )

    def flush(self) -> None:
        """Make durable what was appended, because merging stops; never raises, what cannot be is not counted."""
        if self._recorder is not None:
            with suppress(Exception):
                self._recorder.flush()
            with suppress(RankfoldError):
                self.settle()

    def _with_definitions(self, packet: Packet) -> Packet:
        """Add the definitions that came with the offers to the first packet that has rows of them."""
        if not packet.definitions and self._catalogue.knows(packet.sites):
            return packet
        defined = {site.site_id for site in packet.definitions}
        new = {key for key in (*packet.sites.tolist(), *defined) if key not in self._catalogue}
        unknown = sorted(key for key in new if key not in self._offered and key not in defined)
        if unknown:
            raise PacketMalformedError(
                f"{len(unknown)} rows have site ids that no rank has defined, the first is {unknown[0]:#018x}",
                step=packet.step,
            )
        # What was offered goes first: it is the earlier definition. Its order is that of the model.
        offered = [definition for key, definition in self._offered.items() if key in new]
        joined = join_definitions((offered, defined_sites(packet)))
        return replace(
            packet, definitions=tuple(site for site, _ in joined), defined_by=tuple(ranks for _, ranks in joined)
        )

    def close(self, deadline_s: float, failure: RankfoldError | None, missing: Iterable[int]) -> CloseReport:
        """Close the recorder within ``deadline_s`` and return the account of the run; never raises."""
        self._missing.update(missing)
        sinks: tuple[SinkReport, ...] = ()
        if self._recorder is not None:
            try:
                sinks = self._recorder.close(deadline_s)
            except Exception as error:
                failure = failure or _close_failed(error)
                self._recorder.abort()
            try:
                self.settle()
            except RankfoldError as error:
                failure = failure or error
        return self.report(failure, sinks)

    def report(self, failure: RankfoldError | None, sinks: tuple[SinkReport, ...] = ()) -> CloseReport:
        """Return the account so far."""
        return self.account.report(failure, self._missing, sinks, self._findings.report())


@contextmanager
def _writing(step: int | None) -> Iterator[None]:
    """Turn whatever a recorder raises into our errors."""
    try:
        yield
    except RankfoldError:
        raise
    except Exception as error:
        raise HistoryError(
            f"the step could not be written: {type(error).__name__}: {error}",
            rank=0,
            step=step,
            remedy="what was committed before is readable; free or repair the storage and resume the run",
        ) from error


def _close_failed(error: Exception) -> RankfoldError:
    if isinstance(error, RankfoldError):
        return error
    return HistoryError(
        f"the record could not be closed: {type(error).__name__}: {error}",
        rank=0,
        remedy="every committed step is readable; look at the storage before the run is resumed",
    )
