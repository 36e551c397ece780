"""How an actor that was started again goes on with the record of its own attempt.

The run directory alone says what is durable. An incarnation never writes into a segment of an earlier one, which may
still be alive on a node that was taken for dead: it claims the next segment, and with that seals all before it. What
the earlier one published until then counts, and what it publishes after that fails.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from aggregator.catalogue import MergedStep
from aggregator.collective.account import Account
from aggregator.collective.recording import StepRecorder
from aggregator.history import open_history
from aggregator.history.layout import segment_numbers
from aggregator.history.snapshot import SegmentView, SnapshotReader, read_manifest
from aggregator.ray_actor.membership import StepKey
from telemetry.errors import HistoryNotFoundError, RankfoldError, WriterFencedError
from telemetry.protocol import AttachOffer, AttachReply, SinkReport

__all__ = ["MARK", "OwnRecord", "SuccessorRecorder", "belongs_to", "last_mark", "read_own_record"]

# Key of the run record under which a segment says which attempt has written it.
MARK: Final = "ray"

# A claim is taken up within moments; a folder that is not after this long is of a process that died over it.
_HALF_CLAIM_S: Final = 2.0
_POLL_S: Final = 0.05


@dataclass(frozen=True)
class OwnRecord:
    """What earlier incarnations of this attempt have made durable.

    The ranks count the segments of an attempt without those that restarts of the actor add; ``segment`` and ``durable``
    are in their count.

    Attributes:
        run_id: of the run.
        first_segment: the segment that the ranks were told at attach, None if none was taken up.
        last_folder: the newest segment in the directory, taken up or not; the successor has to follow it.
        segment: in which the successor goes on.
        resume_step: the first step there that is not durable, None if none is.
        account, missing_ranks, findings: the totals so far, as in ``CloseReport``.
        durable: step → ranks that are absent from it.
    """

    run_id: str
    first_segment: int | None
    last_folder: int | None
    segment: int = 0
    resume_step: int | None = None
    account: Account = field(default_factory=Account)
    missing_ranks: frozenset[int] = frozenset()
    findings: tuple[Mapping[str, Any], ...] = ()
    durable: Mapping[StepKey, frozenset[int]] = field(default_factory=dict)


def belongs_to(run: Mapping[str, Any], attempt: str) -> bool:
    """Tell whether a run record, of a manifest or of a segment, was written by ``attempt``."""
    return bool((run.get(MARK) or {}).get("attempt") == attempt)


def last_mark(path: Path) -> Mapping[str, Any]:
    """Return what the newest segment of a run says of the attempt that wrote it, empty if nothing or no run."""
    try:
        views = SnapshotReader().segments(path) if (path / "manifest.json").exists() else ()
    except FileNotFoundError:
        return {}
    return (views[-1].record["run"].get(MARK) or {}) if views else {}


def read_own_record(path: Path, attempt: str) -> OwnRecord | None:
    """Return what this attempt has in the directory, None if it has not begun there.

    Raises:
        WriterFencedError: a later attempt has continued the run.
        HistoryError: the run cannot be read.
    """
    try:
        manifest = read_manifest(path)
    except HistoryNotFoundError:
        return None
    views = _settled_views(path)
    own = [view for view in views if belongs_to(view.record["run"], attempt)]
    if not own and not (belongs_to(manifest["run"], attempt) and not views):
        return None
    if own and views[-1].number != own[-1].number:
        raise WriterFencedError(
            f"a later attempt has continued the run in {path} with segment {views[-1].number}",
            remedy="stop this attempt; its steps up to the fence are kept",
        )
    numbers = segment_numbers(path)
    run_id, last = str(manifest["run_id"]), numbers[-1] if numbers else None
    return _read(path, run_id, own, last) if own else OwnRecord(run_id, None, last)


def _settled_views(path: Path) -> tuple[SegmentView, ...]:
    """Return the segments, once the newest folder is taken up or its process must be dead."""
    deadline = time.monotonic() + _HALF_CLAIM_S
    while True:
        views = SnapshotReader().segments(path)
        numbers = segment_numbers(path)
        is_whole = not numbers or (views and views[-1].number == numbers[-1])
        if is_whole or time.monotonic() > deadline:
            return views
        time.sleep(_POLL_S)


def _as_ranks_count(own: Sequence[SegmentView]) -> dict[int, int]:
    """Return number of a segment → its number as the ranks count.

    The first segment of an incarnation goes on in the one that its mark says; each further one is one that the ranks
    have begun.
    """
    counted: dict[int, int] = {}
    incarnation, number = None, 0
    for view in own:
        mark = view.record["run"][MARK]
        if mark["incarnation"] == incarnation:
            number += 1
        else:
            number = view.number if mark["segment"] is None else mark["segment"]
        incarnation = mark["incarnation"]
        counted[view.number] = number
    return counted


def _resume_step(view: SegmentView) -> int:
    if view.index is not None and view.index.last_step is not None:
        return view.index.last_step + 1
    return view.record["resume_step"] or 0


def _read(path: Path, run_id: str, own: Sequence[SegmentView], last_folder: int | None) -> OwnRecord:
    history, counted = open_history(path), _as_ranks_count(own)
    account = Account()
    missing: set[int] = set()
    durable: dict[StepKey, frozenset[int]] = {}
    for row in _of_segments(history.steps(include_superseded=True), counted).to_pylist():
        absent = frozenset(row["missing_ranks"]) - frozenset(row["abstained_ranks"])
        durable[counted[row["segment"]], row["step"]] = absent
        missing |= absent
        account = account.with_step(
            row["step"], is_partial=bool(row["missing_ranks"]), num_abstained=len(row["abstained_ranks"])
        )
    findings = _of_segments(history.findings(), counted).column("details").to_pylist()
    return OwnRecord(
        run_id=run_id,
        first_segment=own[0].number,
        last_folder=last_folder,
        segment=counted[own[-1].number],
        resume_step=_resume_step(own[-1]),
        account=account,
        missing_ranks=frozenset(missing),
        findings=tuple(json.loads(text) for text in findings),
        durable=durable,
    )


def _of_segments(table: pa.Table, numbers: Iterable[int]) -> pa.Table:
    return table.filter(pa.compute.is_in(table["segment"], pa.array(list(numbers), table["segment"].type)))


class SuccessorRecorder:
    """Continues the record of an earlier incarnation; a ``StepRecorder``.

    Args:
        attempt: whose record it is.
        make: makes the recorder that writes, given the segment that its own must follow.
    """

    def __init__(self, attempt: str, make: Callable[[int | None], StepRecorder]) -> None:
        self._attempt = attempt
        self._make = make
        self._recorder: StepRecorder | None = None

    def claim(self, offer: AttachOffer) -> AttachReply:
        """Claim the next segment, from the first step that is not durable.

        Raises:
            WriterFencedError: a later attempt came first.
            RankfoldError: as the recorder's own ``claim``.
        """
        while True:
            known = self._read(offer)
            first = known.resume_step if known.resume_step is not None else offer.resume_step or 0
            run = {**offer.run, MARK: {**offer.run[MARK], "segment": known.segment}}
            recorder = self._make(known.last_folder)
            reply = recorder.claim(replace(offer, run=run, resume_step=first))
            self._recorder = recorder
            if _num_own_steps(Path(offer.to), self._attempt) == len(known.durable):
                return reply
            # The earlier incarnation committed while we looked. It is sealed by now, so the next look is the last.
            recorder.abort()

    def _read(self, offer: AttachOffer) -> OwnRecord:
        known = read_own_record(Path(offer.to), self._attempt)
        if known is None:
            raise HistoryNotFoundError(
                f"{offer.to} no longer holds the run that this attempt was writing",
                remedy="give a directory that every node sees, because the actor may be started again on another one",
            )
        return known

    def guard(self) -> None:
        """Prepare for a signal; see ``StepRecorder.guard``."""
        self._claimed().guard()

    def append(self, step: MergedStep) -> Future[MergedStep]:
        """Take one step; see ``StepRecorder.append``."""
        return self._claimed().append(step)

    def begin_segment(self, resume_step: int) -> int:
        """Begin the next segment; see ``StepRecorder.begin_segment``."""
        return self._claimed().begin_segment(resume_step)

    @property
    def failure(self) -> RankfoldError | None:
        """Why no further step can be appended; see ``StepRecorder.failure``."""
        return self._claimed().failure

    def flush(self) -> None:
        """Make durable what was appended; see ``StepRecorder.flush``."""
        self._claimed().flush()

    def close(self, deadline_s: float) -> tuple[SinkReport, ...]:
        """Seal the segment; see ``StepRecorder.close``."""
        return self._claimed().close(deadline_s)

    def abort(self) -> None:
        """Let go of everything; see ``StepRecorder.abort``."""
        if self._recorder is not None:
            self._recorder.abort()

    def _claimed(self) -> StepRecorder:
        assert self._recorder is not None, "claim comes first"
        return self._recorder


def _num_own_steps(path: Path, attempt: str) -> int:
    """Return how many steps the segments of the attempt hold, superseded ones included."""
    views = [view for view in SnapshotReader().segments(path) if belongs_to(view.record["run"], attempt)]
    return sum(view.index.num_commits for view in views if view.index)
