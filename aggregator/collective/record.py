"""Rank zero's end of the merge: a merged packet becomes a named step and goes to the recorder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from aggregator.catalogue import Catalogue, MergedStep
from aggregator.collective.account import Account
from aggregator.collective.recording import RecorderFactory, StepRecorder
from aggregator.collective.round import Brought
from aggregator.merge import MAX_FINDINGS
from telemetry.errors import HistoryError, PacketMalformedError, RankfoldError
from telemetry.packet import Packet
from telemetry.protocol import AttachOffer, AttachReply, CloseReport, SinkReport
from telemetry.sites import SiteSpec

__all__ = ["Record"]


class Record:
    """The record of one segment, from claim to close. Rank zero, merging thread."""

    def __init__(self, factory: RecorderFactory) -> None:
        """Make no recorder yet: a refusal at attach must leave no trace on disk."""
        self._factory = factory
        self._recorder: StepRecorder | None = None
        self._catalogue = Catalogue()
        self._offered: dict[int, SiteSpec] = {}
        self._missing: set[int] = set()
        self._findings: list[Mapping[str, Any]] = []
        self.account = Account()

    def claim(self, offer: AttachOffer, sites: Iterable[SiteSpec]) -> AttachReply:
        """Open the record with the sites of all ranks.

        Raises:
            RankfoldError: the recorder refuses.
        """
        self._offered = {site.site_id: site for site in sites}
        recorder = self._factory()
        try:
            reply = recorder.claim(replace(offer, sites=tuple(self._offered.values())))
        except BaseException:
            recorder.abort()
            raise
        self._recorder = recorder
        return reply

    def commit(self, outcome: Brought) -> None:
        """Write one step.

        Raises:
            RankfoldError: it is not in the record; merging must stop.
        """
        assert self._recorder is not None, "attach claims before any step"
        self._missing.update(outcome.missing)
        step = MergedStep.resolve(self._with_definitions(outcome.packet), self._catalogue, outcome.missing)
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
        self._findings.extend(step.packet.findings[: MAX_FINDINGS - len(self._findings)])
        self.account = self.account.with_step(
            step.step, is_partial=step.is_partial, num_abstained=len(outcome.packet.abstained)
        )

    def _with_definitions(self, packet: Packet) -> Packet:
        """Add the definitions that came with the offers to the first packet that has rows of them."""
        defined = {site.site_id for site in packet.definitions}
        lacking = [key for key in map(int, packet.sites) if key not in self._catalogue and key not in defined]
        unknown = [key for key in lacking if key not in self._offered]
        if unknown:
            raise PacketMalformedError(
                f"{len(unknown)} rows have site ids that no rank has defined, the first is {unknown[0]:#018x}",
                step=packet.step,
            )
        return replace(packet, definitions=(*packet.definitions, *(self._offered[key] for key in lacking)))

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
        return self.account.report(failure, self._missing, sinks, tuple(self._findings))


def _close_failed(error: Exception) -> RankfoldError:
    if isinstance(error, RankfoldError):
        return error
    return HistoryError(
        f"the record could not be closed: {type(error).__name__}: {error}",
        rank=0,
        remedy="every committed step is readable; look at the storage before the run is resumed",
    )
