"""What a rank and its children have brought and nobody has merged yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from aggregator.collective.round import Absent, Brought, Closed, Contribution
from telemetry.errors import RankfoldError

__all__ = ["Sources"]


class Sources:
    """A queue for each source of a round, which are the rank itself and its children. Used by the merging thread only.

    What a source brought before it was lost still counts, in order; then it is absent from every round.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        """Begin with nothing from any of ``ranks``."""
        self._pending: dict[int, deque[Contribution]] = {rank: deque() for rank in ranks}
        self._lost: dict[int, Absent] = {}

    def add(self, source: int, contribution: Contribution) -> None:
        """Append what ``source`` brought."""
        self._pending[source].append(contribution)

    def lose(self, source: int, reason: str, error: RankfoldError) -> None:
        """Expect nothing more from ``source``; the first reason stays."""
        self._lost.setdefault(source, Absent(reason, error))

    def waiting(self) -> list[int]:
        """Return the sources that the next round lacks."""
        return [source for source in self._pending if self._next(source) is None]

    def has_step(self) -> bool:
        """Tell whether some source has brought a step for the next round."""
        return any(isinstance(self._next(source), Brought) for source in self._pending)

    def pop_round(self) -> dict[int, Contribution]:
        """Take one contribution of every source; none may be waiting. A close stays: nothing comes after it."""
        taken = {source: found for source in self._pending if (found := self._next(source)) is not None}
        assert len(taken) == len(self._pending), "a round needs every source"
        for source, contribution in taken.items():
            if self._pending[source] and not isinstance(contribution, Closed):
                self._pending[source].popleft()
        return taken

    def _next(self, source: int) -> Contribution | None:
        return self._pending[source][0] if self._pending[source] else self._lost.get(source)
