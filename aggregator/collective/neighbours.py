"""The links of one rank, and which of them still work."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from aggregator.collective.frames import Frame
from aggregator.collective.tree import TreePosition
from telemetry.errors import PeerLostError

__all__ = ["Neighbours", "Sender"]


class Sender(Protocol):
    """This side of a connection to one rank."""

    def post(self, frame: Frame) -> None:
        """Begin to send a frame and return; :class:`PeerLostError` if the connection is broken."""
        ...

    def end(self) -> None:
        """Say that nothing more comes."""
        ...

    def release(self, deadline: float) -> None:
        """Drop the connection once the peer has said the same, at ``deadline`` (monotonic seconds) at the latest."""
        ...


class Neighbours:
    """Sends to the parent and to the children. Used by the merging thread only."""

    def __init__(self, position: TreePosition, links: Mapping[int, Sender]) -> None:
        """Take over the links (peer → link) of the neighbours that came."""
        self._parent = position.parent
        self._links = dict(links)
        self._alive = set(links)
        self._num_sent = dict.fromkeys(links, 0)

    def is_alive(self, peer: int) -> bool:
        """Tell whether frames can be sent to ``peer``."""
        return peer in self._alive

    def forget(self, peer: int) -> None:
        """Send nothing more to ``peer``."""
        self._alive.discard(peer)

    def send_up(self, frame: Frame) -> None:
        """Begin to send to the parent. Nothing is raised if it is lost: the reader of the link tells."""
        assert self._parent is not None, "the root has nobody above"
        self._send(self._parent, frame)

    def send_down(self, frame: Frame) -> None:
        """Begin to send to every child that is left."""
        for child in sorted(self._alive - {self._parent}):
            self._send(child, frame)

    def _send(self, peer: int, frame: Frame) -> None:
        if peer in self._alive:
            number, self._num_sent[peer] = self._num_sent[peer], self._num_sent[peer] + 1
            with suppress(PeerLostError):
                self._links[peer].post(replace(frame, number=number))

    def close(self, goodbye_s: float) -> None:
        """End every link: at once if all peers answer, after ``goodbye_s`` and a little more if one does not."""
        for link in self._links.values():
            link.end()
        deadline = time.monotonic() + goodbye_s
        for link in self._links.values():
            link.release(deadline)
        self._alive.clear()
