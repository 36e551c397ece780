"""The order of the frames of one peer: each arrives once and in turn, or not at all.

A socket keeps order by itself. The merge does not lean on that: a step that came twice would count twice, and one
that overtook another would pair with the wrong one.
"""

from __future__ import annotations

from collections.abc import Iterator

from aggregator.collective.frames import Frame

__all__ = ["FrameOrder"]


class FrameOrder:
    """Holds frames back until all that were sent before them are there, and drops what came before."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, Frame] = {}

    def accept(self, frame: Frame) -> Iterator[Frame]:
        """Yield the frames whose turn has come."""
        if frame.number >= self._next:
            self._early.setdefault(frame.number, frame)
        while (due := self._early.pop(self._next, None)) is not None:
            self._next += 1
            yield due
