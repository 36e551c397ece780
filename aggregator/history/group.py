"""Steps that wait to be committed together: one durable write for several of them costs what one for each costs."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import pyarrow as pa

__all__ = ["GroupCommit", "PendingSteps"]


@dataclass(frozen=True)
class GroupCommit:
    """When steps that were appended become durable, at the latest.

    A step that has a finding is never held back, nor is anything at a flush, SIGTERM, close or interpreter exit.

    Attributes:
        max_steps: so many steps are written together at most.
        max_wait_s: a step waits no longer than this for others.
    """

    max_steps: int = 16
    max_wait_s: float = 1.0


@dataclass
class PendingSteps:
    """The group that is being gathered.

    Attributes:
        steps: step numbers, ascending; tables: encoded rows of each step, by table.
        acknowledgements: one a step, to be resolved when it is durable.
        has_finding: whether something was found wrong in one of them.
    """

    steps: list[int] = field(default_factory=list)
    tables: list[Mapping[str, pa.Table]] = field(default_factory=list)
    acknowledgements: list[Future[None]] = field(default_factory=list)
    has_finding: bool = False

    def add(self, step: int, tables: Mapping[str, pa.Table]) -> Future[None]:
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
        """Tell everybody who waits."""
        for acknowledgement in self.acknowledgements:
            if failure is None:
                acknowledgement.set_result(None)
            else:
                acknowledgement.set_exception(failure)
