"""How the protocol waits: it yields a deadline and is sent the next event, or None once the deadline has passed.

The protocol itself reads no clock of its own, starts no thread and blocks on nothing. A thread drives it in a job, from
an inbox; a virtual clock drives the same code in tests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

from aggregator.collective.inbox import Event, Inbox
from aggregator.collective.neighbours import Neighbours
from aggregator.collective.tree import TreePosition
from aggregator.collective.waits import Waits

__all__ = ["Member", "Waiting", "drive"]

_T = TypeVar("_T")

# Yields the deadline of a wait (seconds of the member's clock, None waits for good), is sent what happened.
Waiting = Generator["float | None", "Event | None", _T]


@dataclass(frozen=True)
class Member:
    """One rank of the tree, as the protocol sees it.

    Attributes:
        position: its place.
        waits: its deadlines.
        neighbours: its links.
        clock: seconds that only go up; the same clock stamps the events of its inbox.
    """

    position: TreePosition
    waits: Waits
    neighbours: Neighbours
    clock: Callable[[], float] = time.monotonic


def drive(protocol: Waiting[_T], inbox: Inbox) -> _T:
    """Run a protocol to its end on this thread; raises what it raises."""
    try:
        deadline = next(protocol)
        while True:
            deadline = protocol.send(inbox.take(deadline))
    except StopIteration as done:
        result: _T = done.value
        return result
