"""Everything that can happen to a rank, in one queue: its training thread, the readers of its links and its recorder
put it there.

The merging thread takes the events out and is the only one to act on them.
"""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass

from aggregator.collective.frames import Frame
from aggregator.collective.order import FrameOrder
from telemetry.packet import Packet

__all__ = ["Broken", "CloseRequested", "Event", "Inbox", "Received", "Recorded", "Submitted"]


@dataclass(frozen=True)
class Submitted:
    """The training thread logged a step."""

    packet: Packet
    at: float
    """Seconds of the member's clock."""


@dataclass(frozen=True)
class CloseRequested:
    """The training thread closes; nothing comes from it any more."""

    at: float
    """Seconds of the member's clock."""


@dataclass(frozen=True)
class Received:
    """A neighbour sent a frame."""

    peer: int
    frame: Frame


@dataclass(frozen=True)
class Broken:
    """The connection to a neighbour ended."""

    peer: int
    reason: str


@dataclass(frozen=True)
class Recorded:
    """Rank zero's recorder has made a step durable, or has failed to; its record tells which."""


Event = Submitted | CloseRequested | Received | Broken | Recorded


class Inbox:
    """Events in the order in which they happened; any thread puts, the merging thread takes.

    Frames of a peer are put in the order in which the peer sent them, each once, whatever the transport did.
    """

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._orders: dict[int, FrameOrder] = {}

    def put(self, event: Event) -> None:
        """Add an event; never blocks."""
        self._events.put(event)

    def on_frame(self, peer: int, frame: Frame) -> None:
        """Add a frame; the callback of a link. Calls for one peer come from one thread."""
        for due in self._orders.setdefault(peer, FrameOrder()).accept(frame):
            self.put(Received(peer, due))

    def on_broken(self, peer: int, reason: str) -> None:
        """Add the end of a connection; the callback of a link."""
        self.put(Broken(peer, reason))

    def take(self, deadline: float | None) -> Event | None:
        """Return the next event, or None once ``deadline`` (monotonic seconds; None waits for good) has passed."""
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            return self._events.get(timeout=timeout)
        except queue.Empty:
            return None

    def poll(self) -> Event | None:
        """Return the next event, or None if nothing has happened."""
        try:
            return self._events.get_nowait()
        except queue.Empty:
            return None
