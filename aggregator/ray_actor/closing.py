"""Which ranks have closed, and whether that is the end of the run or only of their part in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from aggregator.ray_actor.membership import StepKey

__all__ = ["Closer", "Closing"]


@dataclass(frozen=True)
class Closer:
    """A rank that has closed.

    Attributes:
        rank: which one.
        last: the step that it sent last, None if it has sent none.
        newest: the highest that any rank had sent when this one closed, None if there was none.
        waiter: waits for the report.
    """

    rank: int
    last: StepKey | None
    newest: StepKey | None
    waiter: Any


class Closing:
    """The ranks that have closed and have no report yet. Time is passed in, monotonic seconds.

    Args:
        close_s: the job's deadline of the close; half of it is for the ranks to close one after the other.
    """

    def __init__(self, close_s: float) -> None:
        self.close_s = close_s
        self._begun_at: float | None = None
        self._closers: dict[int, Closer] = {}

    def __contains__(self, rank: int) -> bool:
        return rank in self._closers

    @property
    def has_begun(self) -> bool:
        """Whether some rank waits for its report."""
        return self._begun_at is not None

    @property
    def deadline(self) -> float:
        """Until when other ranks may close, and steps may wait; infinite before the first close."""
        return float("inf") if self._begun_at is None else self._begun_at + 0.5 * self.close_s

    def add(self, closer: Closer, now: float) -> None:
        """Note that a rank has closed; one that asks again takes its own place."""
        self._closers[closer.rank] = closer
        if self._begun_at is None:
            self._begun_at = now

    def pop_leavers(self, newest: StepKey | None) -> Iterator[Closer]:
        """Take out the ranks that left while the others train on: somebody has begun a further step since."""
        for rank, closer in list(self._closers.items()):
            if newest is not None and (closer.newest is None or newest > closer.newest):
                yield self._closers.pop(rank)
        if not self._closers:
            self._begun_at = None

    def pop_all(self) -> list[Closer]:
        """Take out all that wait for the report."""
        closers, self._closers = list(self._closers.values()), {}
        return closers
