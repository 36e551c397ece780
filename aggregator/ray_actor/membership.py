"""Which ranks a step has to wait for: they may leave, join, and fall silent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Membership", "StepKey"]

# (segment, step): a step that is run again after the loop went back belongs to a later segment.
StepKey = tuple[int, int]

_BEFORE_ALL: StepKey = (-1, -1)


@dataclass
class _Span:
    """A rank takes part in the steps after ``after`` up to ``until``; None stands for no bound."""

    after: StepKey | None = None
    until: StepKey | None = None

    def holds(self, step: StepKey) -> bool:
        return (self.after is None or step > self.after) and (self.until is None or step <= self.until)


class Membership:
    """The ranks of a job from step to step.

    A rank that missed a deadline is *silent*: steps no longer wait for it, but still say that it is missing, until it
    is heard of again.
    """

    def __init__(self, ranks: Iterable[int] = ()) -> None:
        """Begin with ranks that take part from the first step on."""
        self._spans = {rank: _Span() for rank in ranks}
        self._bounded: set[int] = set()
        self._everyone = frozenset(self._spans)
        self.silent: set[int] = set()

    def __contains__(self, rank: int) -> bool:
        return rank in self._spans

    @property
    def open_ranks(self) -> frozenset[int]:
        """The ranks that have not left."""
        return frozenset(rank for rank, span in self._spans.items() if span.until is None)

    def expected(self, step: StepKey) -> frozenset[int]:
        """Return the ranks that take part in a step."""
        if not self._bounded:
            return self._everyone
        return frozenset(rank for rank, span in self._spans.items() if span.holds(step))

    def awaited(self, step: StepKey) -> frozenset[int]:
        """Return the ranks that a step waits for."""
        expected = self.expected(step)
        return expected - self.silent if self.silent else expected

    def join(self, rank: int, after: StepKey | None) -> None:
        """Take a rank in from the first step after ``after``."""
        self._spans[rank] = _Span(after)
        self.silent.discard(rank)
        self._bounds_changed()

    def leave(self, rank: int, until: StepKey | None) -> None:
        """Expect nothing from a rank after step ``until``, nothing at all if it is None."""
        span = self._spans.setdefault(rank, _Span())
        span.until = _BEFORE_ALL if until is None else until
        self._bounds_changed()

    def _bounds_changed(self) -> None:
        self._everyone = frozenset(self._spans)
        self._bounded = {r for r, s in self._spans.items() if s.after is not None or s.until is not None}
