"""Rank zero's end of the merge: a merged packet becomes a named step and goes to the recorder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from aggregator.catalogue import Catalogue, MergedStep
from aggregator.collective.account import Account
from aggregator.collective.recording import RecorderFactory, StepRecorder
from aggregator.collective.round import Brought
from aggregator.definitions import DefinedSite, defined_sites, join_definitions
from aggregator.findings import FindingLog
from telemetry.errors import HistoryError, PacketMalformedError, RankfoldError
from telemetry.packet import Packet
from telemetry.protocol import AttachOffer, AttachReply, CloseReport, SinkReport

__all__ = ["Record"]


class Record:
    """The record of one segment, from claim to close. Rank zero, merging thread."""

    def __init__(self, factory: RecorderFactory) -> None:
        """Make no recorder yet: a refusal at attach must leave no trace on disk."""
        self._factory = factory
        self._recorder: StepRecorder | None = None
        self._catalogue = Catalogue()
        self._offered: dict[int, DefinedSite] = {}
        self._missing: set[int] = set()
        self._findings = FindingLog()
        self.account = Account()

    def claim(self, offer: AttachOffer, sites: Iterable[DefinedSite]) -> AttachReply:
        """Open the record with the sites of all ranks.

        Raises:
            RankfoldError: the recorder refuses.
        """
        self._offered = {site.site_id: (site, ranks) for site, ranks in sites}
        recorder = self._factory()
        try:
            reply = recorder.claim(replace(offer, sites=tuple(site for site, _ in self._offered.values())))
        except BaseException:
            recorder.abort()
            raise
        self._recorder = recorder
        return reply

    def commit(self, outcome: Brought, merge_s: float) -> None:
        """Write one step, whose merge took ``merge_s`` seconds.

        Raises:
            RankfoldError: it is not in the record; merging must stop.
        """
        assert self._recorder is not None, "attach claims before any step"
        self._missing.update(outcome.missing)
        step = MergedStep.resolve(self._with_definitions(outcome.packet), self._catalogue, outcome.missing, merge_s)
        try:
            step = self._recorder.commit(step)
        except RankfoldError:
            raise
        except Exception as error:
            raise HistoryError(
                f"the step could not be written: {type(error).__name__}: {error}",
                rank=0,
                step=step.step,
                remedy="what was committed before is readable; free or repair the storage and resume the run",
            ) from error
        self._findings.add(step.packet.findings)
        self.account = self.account.with_step(
            step.step, is_partial=step.is_partial, num_abstained=len(outcome.packet.abstained)
        )

    def _with_definitions(self, packet: Packet) -> Packet:
        """Add the definitions that came with the offers to the first packet that has rows of them."""
        if not packet.definitions and self._catalogue.knows(packet.sites):
            return packet
        defined = {site.site_id for site in packet.definitions}
        new = [key for key in dict.fromkeys((*packet.sites.tolist(), *defined)) if key not in self._catalogue]
        unknown = [key for key in new if key not in self._offered and key not in defined]
        if unknown:
            raise PacketMalformedError(
                f"{len(unknown)} rows have site ids that no rank has defined, the first is {unknown[0]:#018x}",
                step=packet.step,
            )
        # What was offered goes first: it is the earlier definition.
        offered = [self._offered[key] for key in new if key in self._offered]
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
        return self.account.report(failure, self._missing, sinks, self._findings.report())


def _close_failed(error: Exception) -> RankfoldError:
    if isinstance(error, RankfoldError):
        return error
    return HistoryError(
        f"the record could not be closed: {type(error).__name__}: {error}",
        rank=0,
        remedy="every committed step is readable; look at the storage before the run is resumed",
    )
