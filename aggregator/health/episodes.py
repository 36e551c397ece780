"""One trouble of one site from its begin to its end, so that it is told once and not at every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aggregator.health.check import Verdict
from aggregator.health.thresholds import Thresholds

__all__ = ["Episode", "Episodes"]


@dataclass
class Episode:
    """A trouble that goes on.

    Attributes:
        first_step: where it began.
        num_steps: logged steps on which it was seen.
        last_told: step of its last finding, None before the first.
        num_clear: observations in a row without it.
    """

    first_step: int
    num_steps: int = 0
    last_told: int | None = None
    num_clear: int = 0


class Episodes:
    """The open episodes of one check: at most one for each site."""

    def __init__(self, thresholds: Thresholds, *, confirm: int) -> None:
        self._thresholds = thresholds
        self._confirm = confirm
        self._open: dict[int, Episode] = {}

    def __len__(self) -> int:
        return len(self._open)

    def advance(self, step: int, verdict: Verdict) -> Mapping[int, Episode]:
        """Take in the verdict of the next step and return the episodes to tell now, in the order of its alarms."""
        self._recover(verdict)
        told = {}
        for site_id in verdict.alarms:
            episode = self._open.setdefault(site_id, Episode(step))
            episode.num_steps += 1
            episode.num_clear = 0
            if self._is_due(episode, step):
                episode.last_told = step
                told[site_id] = episode
        return told

    def _is_due(self, episode: Episode, step: int) -> bool:
        if episode.last_told is None:
            return episode.num_steps >= self._confirm
        return step - episode.last_told >= self._thresholds.repeat_steps

    def _recover(self, verdict: Verdict) -> None:
        # A site that was not judged at this step is neither well nor ill.
        for site_id in [key for key in self._open if key in verdict.judged and key not in verdict.alarms]:
            episode = self._open[site_id]
            episode.num_clear += 1
            if episode.last_told is None or episode.num_clear >= self._thresholds.recover_observations:
                del self._open[site_id]
