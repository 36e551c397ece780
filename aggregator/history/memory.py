"""Recent steps in memory: a cache over the record on disk, or all there is where a run has no directory.

Memory is bounded, so without a directory something must give once it is full, and the caller says what: nothing (the
next due step is refused, with the remedies), the oldest steps (counted), or resolution (two neighbouring spans become
one, exactly, so that the whole run stays, ever coarser towards its beginning).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from aggregator.catalogue import MergedStep
from telemetry.errors import ConfigurationError, HistoryFullError
from telemetry.presence import Presence
from telemetry.summary import identity, merge_packed

__all__ = ["DEFAULT_CAPACITY", "POLICIES", "RecentSteps", "StepSpan"]

DEFAULT_CAPACITY: Final = 256
Policy = Literal["archived", "refuse", "drop_oldest", "coarsen"]
POLICIES: Final = ("archived", "refuse", "drop_oldest", "coarsen")


@dataclass(frozen=True, eq=False)
class StepSpan:
    """The observations of one step, or of several merged as ranks are.

    Attributes:
        step_lo, step_hi: first and last step; num_steps: how many steps are in it.
        sites: uint64 ``[n]``, ascending site ids.
        ints, floats: ``[n, 8]`` int64 and ``[n, 10]`` float64, see ``telemetry.summary.fields``.
        presence: uint8 ``[n]``, the best of any step.
        hist_sites, hist_counts: uint64 ``[h]`` and int64 ``[h, counts]``, over the steps that had a histogram.
    """

    step_lo: int
    step_hi: int
    num_steps: int
    sites: NDArray[np.uint64]
    ints: NDArray[np.int64]
    floats: NDArray[np.float64]
    presence: NDArray[np.uint8]
    hist_sites: NDArray[np.uint64]
    hist_counts: NDArray[np.int64]

    @staticmethod
    def of(step: MergedStep) -> StepSpan:
        """Return the span of one step."""
        p = step.packet
        return StepSpan(p.step, p.step, 1, p.sites, p.ints, p.floats, p.presence, p.hist_sites, p.hist_counts)

    def merge(self, later: StepSpan) -> StepSpan:
        """Return both in one; ``self`` comes first in the order of float additions. Counts are exact."""
        sites = np.union1d(self.sites, later.sites)
        hist_sites = np.union1d(self.hist_sites, later.hist_sites)
        counts = np.zeros((len(hist_sites), self.hist_counts.shape[1]), np.int64)
        for span in (self, later):
            counts[np.searchsorted(hist_sites, span.hist_sites)] += span.hist_counts
        (ints_a, floats_a, presence_a), (ints_b, floats_b, presence_b) = self._over(sites), later._over(sites)
        ints, floats = merge_packed((ints_a, floats_a), (ints_b, floats_b))
        presence = np.minimum(presence_a, presence_b)
        num_steps = self.num_steps + later.num_steps
        return StepSpan(self.step_lo, later.step_hi, num_steps, sites, ints, floats, presence, hist_sites, counts)

    def _over(self, sites: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.uint8]]:
        ints, floats = identity(len(sites))
        presence = np.full(len(sites), Presence.NOT_SCHEDULED, np.uint8)
        where = np.searchsorted(sites, self.sites)
        ints[where], floats[where], presence[where] = self.ints, self.floats, self.presence
        return ints, floats, presence


class RecentSteps:
    """The newest steps of a run, at most ``capacity`` spans of them.

    Attributes:
        capacity, policy: as given.
        num_dropped: steps that are no longer here; with an archive they are on disk.
        num_coarsened: spans that were merged into another.
    """

    def __init__(self, capacity: int = DEFAULT_CAPACITY, policy: Policy = "refuse") -> None:
        """Begin empty.

        Args:
            capacity: spans to keep, at least 2.
            policy: ``archived`` where the record on disk has every step, so the oldest are let go; else ``refuse``,
                ``drop_oldest`` or ``coarsen``.

        Raises:
            ConfigurationError: there is no such policy, or the capacity is less than 2.
        """
        if policy not in POLICIES or capacity < 2:
            raise ConfigurationError(
                f"capacity {capacity} with policy {policy!r}", remedy=f"keep 2 or more, under one of {POLICIES}"
            )
        self.capacity = capacity
        self.policy = policy
        self.num_dropped = 0
        self.num_coarsened = 0
        self._spans: deque[StepSpan] = deque()

    def __len__(self) -> int:
        return len(self._spans)

    def __iter__(self) -> Iterator[StepSpan]:
        return iter(tuple(self._spans))

    def require_room(self, step: int) -> None:
        """Refuse a step that is due before anything of it is observed; a step that is not due needs no room.

        Raises:
            HistoryFullError: under ``refuse``, memory is full.
        """
        if self.policy == "refuse" and len(self._spans) >= self.capacity:
            raise HistoryFullError(
                f"{len(self._spans)} steps are in memory, as many as were allowed, and the run has no directory",
                step=step,
                remedy="give a directory as `to`, log less often with a larger `every`, allow more steps, or choose "
                "the policy 'drop_oldest' or 'coarsen'",
            )

    def add(self, step: MergedStep) -> None:
        """Keep a step; what gives way if memory is full, the policy says.

        Raises:
            HistoryFullError: as for :meth:`require_room`.
        """
        self.require_room(step.step)
        if len(self._spans) >= self.capacity:
            if self.policy == "coarsen":
                self._coarsen()
            else:
                self.num_dropped += self._spans.popleft().num_steps
        self._spans.append(StepSpan.of(step))

    def _coarsen(self) -> None:
        """Merge each two neighbours, so that the whole run stays within half of the memory."""
        spans = list(self._spans)
        pairs = [first.merge(second) for first, second in zip(spans[::2], spans[1::2], strict=False)]
        self.num_coarsened += len(pairs)
        self._spans = deque([*pairs, *spans[len(pairs) * 2 :]])
