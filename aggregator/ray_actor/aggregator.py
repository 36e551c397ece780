"""The side of the Ray backend that the training thread touches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from aggregator.collective.transport import agree_on_attempt
from aggregator.ray_actor.actors import ActorNames, find_or_create_root
from aggregator.ray_actor.delivery import Delivery, packet_bytes
from aggregator.ray_actor.destination import RayDestination
from aggregator.ray_actor.joining import ask, make_request
from aggregator.ray_actor.library import connect, is_worker_process, load_ray
from aggregator.ray_actor.placing import require_fan_in
from aggregator.ray_actor.root import ORPHAN_S
from telemetry.errors import (
    ConfigurationError,
    MergeDeadlineError,
    RankfoldError,
)
from telemetry.packet import Packet
from telemetry.protocol import AttachOffer, AttachReply, CloseReport
from telemetry.sites import SiteSpec

__all__ = ["RayAggregator"]

# Beyond close_s, for the delivery thread to end.
_MARGIN_S: Final = 3.0
_MAX_CALLS: Final = 16
# Packets without observations that may wait behind a full queue; they tell the record that a rank had to let go.
_MAX_ABSTAINED: Final = 1024


class RayAggregator:
    """Merges in a Ray actor that outlives the ranks, and writes a run directory from there.

    Implements ``telemetry.protocol.Aggregator``. ``watch(to="ray://NAME?dir=PATH")`` makes one with the defaults.

    Example:
        >>> str(RayAggregator("exp1", "/shared/runs/exp1"))  # doctest: +SKIP
        'ray://exp1?dir=/shared/runs/exp1'
    """

    def __init__(
        self,
        name: str | None = None,
        directory: str | None = None,
        *,
        attempt: str | None = None,
        fan_in: int = 64,
        max_in_flight: int = 1024,
        max_in_flight_bytes: int = 1 << 30,
        num_cpus: float = 0.0,
        orphan_s: float = ORPHAN_S,
    ) -> None:
        """Make an aggregator that is not attached yet.

        Args:
            name: what every attempt's actor is found by; None takes it from ``to``.
            directory: run directory, ``runs/NAME`` by default; seen from rank zero, written by the actor.
            attempt: what the ranks of one attempt share and no other attempt has. Left out, the ranks agree on it
                through the store of ``torch.distributed``; give it where ranks are no process group.
            fan_in: most packets of a step that one actor hears; rank zero's counts.
            max_in_flight, max_in_flight_bytes: of the whole job, packets that are submitted and not durable yet. Each
                rank has an equal share, at least one packet; beyond it, it sends its steps without observations.
            num_cpus: what the actor reserves. With the default it can be placed in a cluster that is full.
            orphan_s: how long no rank may be heard of before the actor closes the record and ends.

        Raises:
            AggregatorUnavailableError: Ray is not installed.
            ConfigurationError: the name, the directory or a number cannot be.
        """
        load_ray()
        require_fan_in(fan_in)
        if name is None and directory is not None:
            raise ConfigurationError("a directory without a name", remedy="give name, too")
        if max_in_flight < 1 or max_in_flight_bytes < 1:
            raise ConfigurationError(
                f"max_in_flight is {max_in_flight}, max_in_flight_bytes {max_in_flight_bytes}", remedy="give at least 1"
            )
        self._given = None if name is None else RayDestination.of(name, directory)
        self._attempt, self._fan_in, self._num_cpus, self._orphan_s = attempt, fan_in, num_cpus, orphan_s
        self._max_in_flight, self._max_in_flight_bytes = max_in_flight, max_in_flight_bytes
        self._share = self._share_bytes = 0
        self._num_submitted = self._submitted_bytes = self._num_dropped = 0
        self._unsent: tuple[SiteSpec, ...] = ()
        self._close_s = 0.0
        self._delivery: Delivery | None = None
        self._refusal: RankfoldError | None = None
        self._report: CloseReport | None = None

    def __str__(self) -> str:
        return str(self._given) if self._given else "ray://"

    def attach(self, offer: AttachOffer) -> AttachReply:
        """Agree with all ranks; see ``telemetry.protocol.Aggregator.attach``.

        Raises:
            AggregatorUnavailableError: there is no Ray cluster.
            ProcessGroupMissingError: several ranks, but neither a process group nor ``attempt``.
            AttachTimeoutError: names the ranks that did not come within ``attach_s``.
            RankfoldError: any rank's refusal, on all ranks, with ``failures``.
        """
        try:
            return self._attach(offer)
        except RankfoldError as error:
            self._refusal = error
            raise

    def _attach(self, offer: AttachOffer) -> AttachReply:
        try:
            destination = self._given or RayDestination.parse(offer.to)
            ray = connect()
            _require_absolute(destination)
        except RankfoldError as error:
            if not offer.disabled_by:
                raise
            # A switch that turns things off must not refuse.
            return AttachReply("", 0, offer.disabled_by, unrecorded=str(error))
        attempt = self._attempt or agree_on_attempt(offer.rank, offer.world_size, offer.deadlines.attach_s)
        names = ActorNames(destination.name, attempt)
        node = ray.get_runtime_context().get_node_id()
        actor = find_or_create_root(
            names,
            world_size=offer.world_size,
            fan_in=self._fan_in,
            node=node,
            num_cpus=self._num_cpus,
            orphan_s=self._orphan_s,
        )
        request = make_request(replace(offer, to=destination.resolved().directory), node)
        joined = ask(actor, request, offer.deadlines)
        self._share = max(1, self._max_in_flight // offer.world_size)
        self._share_bytes = self._max_in_flight_bytes // offer.world_size
        self._close_s = offer.deadlines.close_s
        self._delivery = Delivery(names, request, joined, offer.deadlines, min(self._share, _MAX_CALLS))
        return joined.reply

    def submit(self, packet: Packet) -> None:
        """Queue a logged step; returns at once and never raises.

        Beyond this rank's share of what may be in flight, the packet goes without its observations; beyond 1024 more
        such packets it does not go at all, and is counted at the close.
        """
        delivery = self._delivery
        if delivery is None or delivery.failure is not None:
            return
        if self._unsent:
            packet = replace(packet, definitions=(*self._unsent, *packet.definitions))
            self._unsent = ()
        num_waiting = self._num_submitted - delivery.counts.num_settled
        waiting_bytes = self._submitted_bytes - delivery.counts.settled_bytes
        is_full = num_waiting >= self._share or waiting_bytes + packet_bytes(packet) > self._share_bytes
        if num_waiting and is_full:
            if num_waiting >= self._share + _MAX_ABSTAINED:
                self._num_dropped += 1
                self._unsent = packet.definitions
                return
            packet = packet.abstaining(f"too many steps in flight: {num_waiting} are not durable yet")
        self._num_submitted += 1
        self._submitted_bytes += packet_bytes(packet)
        delivery.put(packet)

    @property
    def failure(self) -> RankfoldError | None:
        """Why merging has stopped for this rank, or None while it runs."""
        return self._refusal if self._delivery is None else self._delivery.failure

    def close(self) -> CloseReport:
        """Deliver what is in flight, leave the run, and account for it.

        Bounded by ``close_s`` and a few seconds, whatever the other ranks and the actor do; a second call returns the
        same report. A rank that closes while others go on leaves the run, and gets the account so far.
        """
        delivery = self._delivery
        if delivery is None:
            return CloseReport(failure=self._refusal)
        if self._report is None:
            report = delivery.close(self._num_dropped, self._close_s + _MARGIN_S)
            self._report = report or delivery.account.report(delivery.failure or _delivery_stuck(self._close_s))
        return self._report


def _require_absolute(destination: RayDestination) -> None:
    if is_worker_process() and not Path(destination.directory).is_absolute():
        raise ConfigurationError(
            f"the directory {destination.directory!r} is relative, and the working directory of a Ray worker is Ray's",
            remedy=f"give an absolute one, that every node sees: ray://{destination.name}?dir=/shared/runs/…",
        )


def _delivery_stuck(close_s: float) -> MergeDeadlineError:
    return MergeDeadlineError(
        f"the delivery thread did not end within {close_s:g} s of the close",
        remedy="look at the load of this node, or raise deadlines.close_s",
    )
