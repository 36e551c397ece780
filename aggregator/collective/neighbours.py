"""The links of one rank, and which of them still work."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

from aggregator.collective.frames import Frame
from aggregator.collective.transport import Link
from aggregator.collective.tree import TreePosition
from telemetry.errors import PeerLostError

__all__ = ["Neighbours"]


class Neighbours:
    """Sends to the parent and to the children. Used by the merging thread only."""

    def __init__(self, position: TreePosition, links: Mapping[int, Link]) -> None:
        """Take over the links (peer → link) of the neighbours that came."""
        self._parent = position.parent
        self._links = dict(links)
        self._alive = set(links)

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
        for child in self._alive - {self._parent}:
            self._send(child, frame)

    def _send(self, peer: int, frame: Frame) -> None:
        if peer in self._alive:
            with suppress(PeerLostError):
                self._links[peer].post(frame)

    def close(self, goodbye_s: float) -> None:
        """End every link: at once if all peers answer, after ``goodbye_s`` and a little more if one does not."""
        for link in self._links.values():
            link.end()
        deadline = time.monotonic() + goodbye_s
        for link in self._links.values():
            link.release(deadline)
        self._alive.clear()
