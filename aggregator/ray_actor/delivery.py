"""The delivery thread of one rank: sends packets to the actor, keeps them until they are durable, and sends them again.

The training thread only puts events into a queue. This thread alone talks to the actor, and never waits for one call:
answers come back as further events. A call that fails means that the actor is being started again, or gone for good;
the rank then joins anew and delivers everything again that has no answer.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from aggregator.collective.account import Account, report_from_wire
from aggregator.ray_actor.actors import ActorNames, find_actor
from aggregator.ray_actor.membership import StepKey
from aggregator.ray_actor.messages import Joined, JoinRequest, Receipt, Refused, State
from aggregator.ray_actor.placing import ROOT
from telemetry.errors import MergeDeadlineError, PeerLostError, RankfoldError
from telemetry.packet import Packet
from telemetry.protocol import CloseReport, Deadlines
from telemetry.sites import SiteSpec

__all__ = ["Counts", "Delivery", "packet_bytes"]

_FIRST_RETRY_S: Final = 0.1
_LAST_RETRY_S: Final = 2.0
_BEAT_S: Final = 5.0
# Beats of all ranks together, a second.
_BEATS_PER_S: Final = 100.0
_REMEDY: Final = (
    "look into the log of the actor, named root-… in its namespace; training goes on, nothing more is recorded until "
    "telemetry.watch is called again"
)


@dataclass
class _Outgoing:
    """A packet without an answer. ``call`` numbers the call that is under way, 0 if there is none."""

    data: bytes
    size_bytes: int
    previous: StepKey | None
    call: int = 0

    def send(self, actor: Any) -> Any:
        return actor.deliver.remote(self.data, self.previous)


@dataclass(frozen=True)
class _Answered:
    """A call ended, with a value or an error."""

    call: int
    what: str
    step: StepKey | None
    value: Any
    error: BaseException | None


@dataclass(frozen=True)
class _Close:
    at: float
    num_dropped: int


@dataclass
class Counts:
    """What the training thread reads to decide about the next packet; written by the delivery thread.

    Attributes:
        num_settled: packets that have an answer.
        settled_bytes: their size.
    """

    num_settled: int = 0
    settled_bytes: int = 0


class Delivery:
    """Delivers the packets of one rank after it has joined.

    Attributes:
        failure: why nothing more is delivered, None while all is well.
        account: totals of the record as last heard.
        counts: see :class:`Counts`.
    """

    def __init__(
        self, names: ActorNames, request: JoinRequest, joined: Joined, deadlines: Deadlines, max_calls: int
    ) -> None:
        """Begin to deliver.

        Args:
            names: of the actors.
            request: what this rank joined with; it joins with the same again.
            joined: the answer.
            deadlines: of the job.
            max_calls: most deliveries that are under way at a time.
        """
        self.failure: RankfoldError | None = None
        self.account = Account()
        self.counts = Counts()
        self._names, self._request, self._max_calls = names, request, max_calls
        self._charter, self._target_name = joined.charter, joined.target
        self._deadlines = deadlines
        self._beat_s = max(_BEAT_S, request.world_size / _BEATS_PER_S)
        self._events: queue.SimpleQueue[Packet | _Answered | _Close] = queue.SimpleQueue()
        self._unanswered: OrderedDict[StepKey, _Outgoing] = OrderedDict()
        self._defined: dict[int, SiteSpec] = {}
        self._last: StepKey | None = None
        self._calls = itertools.count(1)
        self._actors: dict[str, Any] = {}
        self._is_joined, self._join_call, self._beat_call, self._close_call = True, 0, 0, 0
        self._retry_at: float | None = None
        self._retry_s = _FIRST_RETRY_S
        self._next_beat = time.monotonic() + self._beat_s
        self._heard = time.monotonic()
        self._closing: _Close | None = None
        self._report: CloseReport | None = None
        self._thread = threading.Thread(target=self._run, name="rankfold-delivery", daemon=True)
        self._thread.start()

    # On the training thread.

    def put(self, packet: Packet) -> None:
        """Queue a packet. Returns at once."""
        self._events.put(packet)

    def close(self, num_dropped: int, timeout_s: float) -> CloseReport | None:
        """Deliver what is queued and return the report of the actor; None if there is none after ``timeout_s``."""
        self._events.put(_Close(time.monotonic(), num_dropped))
        self._thread.join(timeout_s)
        return self._report

    # On the delivery thread.

    def _run(self) -> None:
        try:
            while self._report is None:
                self._step(self._wait())
        except BaseException as error:
            self._fail(RankfoldError(f"delivery failed: {type(error).__name__}: {error}", rank=self._request.rank))
            self._drain()

    def _wait(self) -> Packet | _Answered | _Close | None:
        times = [self._next_beat, *([] if self._retry_at is None else [self._retry_at])]
        if self._closing is not None:
            times.append(self._closing.at + 0.95 * self._deadlines.close_s)
        try:
            return self._events.get(timeout=max(0.001, min(times) - time.monotonic()))
        except queue.Empty:
            return None

    def _step(self, event: Packet | _Answered | _Close | None) -> None:
        if isinstance(event, Packet):
            self._take(event)
        elif isinstance(event, _Answered):
            self._heed(event)
        elif isinstance(event, _Close):
            self._closing = event
        now = time.monotonic()
        self._check_patience(now)
        if self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
            self._join()
        if self._is_joined and self.failure is None:
            self._send_waiting()
        self._beat_if_due(now)
        self._close_if_asked(now)

    def _take(self, packet: Packet) -> None:
        if self.failure is not None:
            self._settle(packet_bytes(packet))
            return
        if not self._unanswered:
            self._heard = time.monotonic()
        self._defined.update((site.site_id, site) for site in packet.definitions)
        key = packet.segment, packet.step
        self._unanswered[key] = _Outgoing(packet.to_bytes(), packet_bytes(packet), self._last)
        self._last = key

    def _send_waiting(self) -> None:
        num_calls = sum(1 for outgoing in self._unanswered.values() if outgoing.call)
        for step, outgoing in self._unanswered.items():
            if num_calls >= self._max_calls or not self._is_joined:
                return
            if not outgoing.call:
                outgoing.call = self._call(self._target_name, "deliver", step, outgoing.send)
                num_calls += 1

    def _call(self, target: str, what: str, step: StepKey | None, start: Callable[[Any], Any]) -> int:
        """Begin a call; its end becomes an event. Returns its number."""
        number = next(self._calls)
        try:
            if (actor := self._actor(target)) is None:
                raise _GoneError(target)
            future = start(actor).future()
        except Exception as error:
            self._events.put(_Answered(number, what, step, None, error))
            return number

        def tell(done: Any) -> None:
            error = done.exception()
            self._events.put(_Answered(number, what, step, None if error else done.result(), error))

        future.add_done_callback(tell)
        return number

    def _actor(self, target: str) -> Any | None:
        if target not in self._actors:
            self._actors[target] = find_actor(self._names, self._names.target(target))
        return self._actors[target]

    def _heed(self, answer: _Answered) -> None:
        if answer.error is None:
            self._heard = time.monotonic()
        if answer.what == "deliver":
            self._heed_delivery(answer)
        elif answer.what == "join" and answer.call == self._join_call:
            self._heed_join(answer)
        elif answer.what == "beat" and answer.call == self._beat_call:
            self._beat_call = 0
            if answer.error is not None or not answer.value:
                self._lose(answer.error)
        elif answer.what == "close" and answer.call == self._close_call:
            self._close_call = 0
            if answer.error is None and answer.value is not None:
                self._conclude(report_from_wire(answer.value))
            else:
                self._lose(answer.error)

    def _heed_delivery(self, answer: _Answered) -> None:
        assert answer.step is not None
        outgoing = self._unanswered.get(answer.step)
        receipt = answer.value
        if isinstance(receipt, Receipt) and receipt.account is not None:
            self.account = receipt.account
        if outgoing is None:
            return
        if isinstance(receipt, Receipt) and receipt.state in (State.DURABLE, State.LATE):
            del self._unanswered[answer.step]
            self._settle(outgoing.size_bytes)
        elif isinstance(receipt, Receipt) and receipt.state is State.STOPPED:
            self._fail(receipt.error or PeerLostError("the actor has stopped merging", rank=self._request.rank))
        elif outgoing.call == answer.call:
            outgoing.call = 0
            self._lose(answer.error)

    def _settle(self, size_bytes: int) -> None:
        self.counts.num_settled += 1
        self.counts.settled_bytes += size_bytes

    # Joining anew.

    def _lose(self, error: BaseException | None) -> None:
        """Note that the actor has to be joined again, after a moment."""
        if self.failure is not None:
            return
        if isinstance(error, _GoneError) and error.target == ROOT:
            self._fail(PeerLostError("the actor of this run is gone", rank=self._request.rank, remedy=_REMEDY))
            return
        self._is_joined = False
        self._actors.clear()
        if self._retry_at is None and not self._join_call:
            self._retry_at = time.monotonic() + self._retry_s
            self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)

    def _join(self) -> None:
        sites = [[site.to_wire(), [self._request.rank]] for site in self._defined.values()]
        ballot: Mapping[str, Any] = {
            **self._request.ballot,
            "sites": [*self._request.ballot["sites"], *sites],
        }
        request = replace(self._request, ballot=ballot, charter=self._charter, is_agreed=True)
        self._join_call = self._call(ROOT, "join", None, lambda actor: actor.join.remote(request))

    def _heed_join(self, answer: _Answered) -> None:
        self._join_call = 0
        if answer.error is not None:
            self._lose(answer.error)
        elif isinstance(answer.value, Refused):
            self._fail(answer.value.error)
        else:
            self._is_joined, self._retry_s = True, _FIRST_RETRY_S
            self._target_name = answer.value.target
            for outgoing in self._unanswered.values():
                outgoing.call = 0
            self._close_call = 0

    def _beat_if_due(self, now: float) -> None:
        if now >= self._next_beat:
            self._next_beat = now + self._beat_s
            if self._is_joined and self.failure is None and not self._beat_call:
                rank = self._request.rank
                self._beat_call = self._call(ROOT, "beat", None, lambda actor: actor.beat.remote(rank))

    def _check_patience(self, now: float) -> None:
        waits = self._unanswered or not self._is_joined
        patience_s = 2.0 * self._deadlines.merge_s + 30.0
        if waits and self.failure is None and now - self._heard > patience_s:
            text = f"the actor of this run gave no answer for {now - self._heard:.3g} s"
            self._fail(MergeDeadlineError(text, rank=self._request.rank, remedy=_REMEDY))

    def _fail(self, error: RankfoldError) -> None:
        self.failure = self.failure or error
        self._drain()

    def _drain(self) -> None:
        for outgoing in self._unanswered.values():
            self._settle(outgoing.size_bytes)
        self._unanswered.clear()

    # The end.

    def _close_if_asked(self, now: float) -> None:
        if self._closing is None or self._report is not None:
            return
        is_gone = isinstance(self.failure, PeerLostError) and self._actor(ROOT) is None
        if now >= self._closing.at + 0.95 * self._deadlines.close_s or is_gone:
            failure = self.failure or self._no_report()
            self._report = self.account.report(failure, failure.failures)
            return
        has_sent_all = self.failure is not None or all(outgoing.call for outgoing in self._unanswered.values())
        if has_sent_all and self._is_joined and not self._close_call and self._retry_at is None:
            rank, last, dropped = self._request.rank, self._last, self._closing.num_dropped
            self._close_call = self._call(ROOT, "close", None, lambda actor: actor.close.remote(rank, last, dropped))

    def _no_report(self) -> RankfoldError:
        return MergeDeadlineError(
            f"the actor gave no report within {self._deadlines.close_s:g} s of the close",
            rank=self._request.rank,
            remedy=_REMEDY,
        )

    def _conclude(self, report: CloseReport) -> None:
        self.failure = self.failure or report.failure
        self._report = report
        rank = self._request.rank
        self._call(ROOT, "farewell", None, lambda actor: actor.farewell.remote(rank))


class _GoneError(Exception):
    """There is no actor of this name any more."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.target = target


def packet_bytes(packet: Packet) -> int:
    """Return about how many bytes a packet takes, without serialising it."""
    return packet.num_rows * 200 + packet.hist_counts.nbytes + 2048
