"""How long a rank waits for its neighbours, in seconds, from its place in the tree."""

from __future__ import annotations

from dataclasses import dataclass

from aggregator.collective.tree import TreePosition
from telemetry.protocol import Deadlines

__all__ = ["Waits"]


@dataclass(frozen=True)
class Waits:
    """The deadlines of one rank.

    A rank waits for what is below it; one level up, a *grace* longer, so that the lowest rank that can name the
    missing one does so before those above give up.
    """

    position: TreePosition
    deadlines: Deadlines

    @property
    def grace_s(self) -> float:
        """Added for each level: a tenth of ``merge_s``, within half a second and ten."""
        return min(10.0, max(0.5, 0.1 * self.deadlines.merge_s))

    @property
    def offers_s(self) -> float:
        """For the offers of the children at attach."""
        return self.deadlines.attach_s + self.grace_s * self.position.height

    @property
    def verdict_s(self) -> float:
        """For the answer of the root at attach."""
        return self.deadlines.attach_s + self.grace_s * (2 * self.position.levels + 1)

    @property
    def round_s(self) -> float:
        """For this rank and its children to bring a step that one of them has brought."""
        return self.deadlines.merge_s + self.grace_s * max(0, self.position.height - 1)

    @property
    def ack_s(self) -> float:
        """For the root to answer a step: at worst each level above waits in full. Only a dead parent takes so long."""
        depth = self.position.depth
        return depth * (self.deadlines.merge_s + self.grace_s * self.position.levels) + 2 * self.grace_s

    @property
    def close_rounds_s(self) -> float:
        """After close began: for the steps in flight and the closes of the children, longest at the root."""
        share = self.position.height / self.position.levels if self.position.levels else 1.0
        return self.deadlines.close_s * (0.25 + 0.25 * share)

    @property
    def close_recorder_s(self) -> float:
        """For the recorder and its sinks, after all rounds."""
        return 0.4 * self.deadlines.close_s

    @property
    def close_report_s(self) -> float:
        """After close began: for the report of the root."""
        return 0.95 * self.deadlines.close_s

    @property
    def goodbye_s(self) -> float:
        """For the neighbours to take the last frames and say that they have."""
        return min(5.0, 0.2 * self.deadlines.close_s)
