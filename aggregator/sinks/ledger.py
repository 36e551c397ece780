"""What became of every scheduled observation of a run in one sink: data, a named presence, or that it was lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

import numpy as np

from aggregator.catalogue import MergedStep
from telemetry.presence import Presence

__all__ = ["DROPPED", "WAITING", "SinkLedger"]

DROPPED: Final = "dropped"
"""Rows of steps that the sink never took: its queue was full, or it had failed."""
WAITING: Final = "waiting"
"""Rows of steps that a sink which is late may still take."""


class SinkLedger:
    """Steps and rows by what became of them; both add up to what was offered. Guarded by its owner's lock."""

    def __init__(self) -> None:
        self._rows: Counter[str] = Counter()
        self._num_offered_rows = 0
        self._num_offered = 0
        self.num_emitted = 0
        self.num_dropped = 0

    def offered(self, step: MergedStep) -> None:
        """A committed step is there for the sink."""
        self._num_offered += 1
        self._num_offered_rows += sum(_scheduled(step).values())

    def emitted(self, step: MergedStep) -> None:
        """The sink has taken a step: each row by its presence."""
        self.num_emitted += 1
        self._rows.update(_scheduled(step))

    def dropped(self, step: MergedStep) -> None:
        """The sink does not get a step."""
        self.num_dropped += 1
        self._rows[DROPPED] += sum(_scheduled(step).values())

    def give_up(self) -> None:
        """The sink has failed: what it has not taken yet, it never will."""
        self.num_dropped = self._num_offered - self.num_emitted
        self._rows[DROPPED] += self._num_waiting_rows()

    def rows(self) -> Mapping[str, int]:
        """Return presence, ``dropped`` or ``waiting`` → number of rows; what is zero is left out."""
        found = {**self._rows, WAITING: self._num_waiting_rows()}
        return {what: count for what, count in found.items() if count}

    def _num_waiting_rows(self) -> int:
        return self._num_offered_rows - sum(self._rows.values())


def _scheduled(step: MergedStep) -> dict[str, int]:
    counts = np.bincount(step.packet.presence, minlength=len(Presence)).tolist()
    return {presence.label: counts[presence] for presence in Presence if presence is not Presence.NOT_SCHEDULED}
