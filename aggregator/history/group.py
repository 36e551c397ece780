"""Steps that wait to be committed together: one durable write for several of them costs what one for each costs."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import pyarrow as pa

from aggregator.catalogue import MergedStep

__all__ = ["GroupCommit", "PendingSteps"]


@dataclass(frozen=True)
class GroupCommit:
    """When steps that were appended become durable, at the latest.

    Where commits take less than ``busy_share`` of the time, a step does not wait: a run that logs now and then has each
    step in the record at once, one that logs faster than it can commit has them there in groups. A step that has a
    finding is never held back, nor is anything at a flush, SIGTERM, close or interpreter exit.

    Attributes:
        max_steps: so many steps are written together at most.
        max_wait_s: a step waits no longer than this for others.
        busy_share: of the time that commits may take, in [0, 1]; 0 lets every step wait for ``max_wait_s``.
    """

    max_steps: int = 16
    max_wait_s: float = 1.0
    busy_share: float = 0.25

    def wait_s(self, commit_s: float, since_s: float) -> float:
        """Return how long a step waits for others, in seconds.

        Args:
            commit_s: what the last commit took, 0 before the first.
            since_s: how long ago it ended.
        """
        if self.busy_share == 0.0:
            return self.max_wait_s
        pause_s = commit_s * (1.0 / self.busy_share - 1.0)
        return min(self.max_wait_s, max(0.0, pause_s - since_s))


@dataclass
class PendingSteps:
    """The group that is being gathered.

    Attributes:
        steps: ascending; tables: encoded rows of each step, by table.
        acknowledgements: one a step, to be resolved when it is durable.
        has_finding: whether something was found wrong in one of them.
    """

    steps: list[MergedStep] = field(default_factory=list)
    tables: list[Mapping[str, pa.Table]] = field(default_factory=list)
    acknowledgements: list[Future[MergedStep]] = field(default_factory=list)
    has_finding: bool = False

    def add(self, step: MergedStep, tables: Mapping[str, pa.Table]) -> Future[MergedStep]:
        """Take a step in, and return what will say that it is durable."""
        self.steps.append(step)
        self.tables.append(tables)
        self.acknowledgements.append(Future())
        self.has_finding = self.has_finding or tables["findings"].num_rows > 0
        return self.acknowledgements[-1]

    def joined(self) -> dict[str, pa.Table]:
        """Return the rows of all steps by table."""
        if len(self.tables) == 1:
            return dict(self.tables[0])
        return {name: pa.concat_tables([tables[name] for tables in self.tables]) for name in self.tables[0]}

    def resolve(self, failure: BaseException | None) -> None:
        """Tell everybody who waits, in the order of steps."""
        for step, acknowledgement in zip(self.steps, self.acknowledgements, strict=True):
            if failure is None:
                acknowledgement.set_result(step)
            else:
                acknowledgement.set_exception(failure)
