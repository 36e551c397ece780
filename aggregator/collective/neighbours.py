"""The links of one rank, and which of them still work."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from aggregator.collective.frames import Frame
from aggregator.collective.transport import Link
from aggregator.collective.tree import TreePosition
from telemetry.errors import PeerLostError

__all__ = ["Neighbours"]

_GOODBYE_S = 1.0


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

    def send_up(self, frame: Frame, timeout_s: float) -> None:
        """Send to the parent and wait until it has left.

        Raises:
            PeerLostError: the parent is lost, or took nothing for ``timeout_s``.
        """
        assert self._parent is not None, "the root has nobody above"
        if self._parent not in self._alive:
            raise PeerLostError(f"the connection to rank {self._parent} is lost", rank=self._parent)
        try:
            self._links[self._parent].post(frame)
            self._links[self._parent].settle(timeout_s)
        except PeerLostError:
            self.forget(self._parent)
            raise

    def send_down(self, frame: Frame, timeout_s: float) -> None:
        """Send to every child that is left, to all at once; those that take nothing for ``timeout_s`` are dropped.

        A dropped child is noticed in the next round, so nothing is raised here.
        """
        deadline = time.monotonic() + timeout_s
        for child in self._children_alive():
            with self._dropping(child):
                self._links[child].post(frame)
        for child in self._children_alive():
            with self._dropping(child):
                self._links[child].settle(max(0.0, deadline - time.monotonic()))

    def _children_alive(self) -> list[int]:
        return sorted(self._alive - {self._parent})

    @contextmanager
    def _dropping(self, child: int) -> Iterator[None]:
        try:
            yield
        except PeerLostError:
            self.forget(child)

    def close(self) -> None:
        """End every link; takes little more than a second even if no peer answers."""
        for link in self._links.values():
            link.end()
        deadline = time.monotonic() + _GOODBYE_S
        for link in self._links.values():
            link.release(deadline)
        self._alive.clear()
