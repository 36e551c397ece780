"""What an actor says of itself: health, lag and counts of one attempt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from aggregator.collective.account import Account

__all__ = ["ActorStatus"]


@dataclass(frozen=True)
class ActorStatus:
    """One incarnation of the root of one attempt, as it is now.

    Attributes:
        name, attempt: which one.
        job: tells the attempts of one Ray Train run from all others, "" outside of Ray Train.
        state: ``gathering`` (waits for ranks to attach), ``merging``, ``closing``, ``closed``, or ``stopped``.
        directory, run_id, segment: of the record, None before the ranks have agreed.
        host, pid: of the process.
        up_s: seconds since it was started, for the last time.
        num_ranks, num_joined: ranks that are expected, and those that this incarnation has heard of.
        num_relays: actors between the ranks and this one.
        silent_ranks: missed a deadline and have not been heard of since.
        newest_step: the highest that any rank has brought.
        num_pending_steps, num_pending_packets: held in memory, not durable.
        oldest_wait_s: how long the oldest of them has been waiting, in seconds: the lag of the record.
        last_write_s: how long the last write took, in seconds.
        num_repeated, num_late: packets that came again, and that came after their step had been written.
        account: what is in the record.
        failure: why merging has stopped, "" while it runs.
    """

    name: str
    attempt: str
    job: str
    state: str
    directory: str | None
    run_id: str | None
    segment: int | None
    host: str
    pid: int
    up_s: float
    num_ranks: int
    num_joined: int
    num_relays: int
    silent_ranks: Sequence[int]
    newest_step: int | None
    num_pending_steps: int
    num_pending_packets: int
    oldest_wait_s: float
    last_write_s: float
    num_repeated: int
    num_late: int
    account: Account
    failure: str

    def to_wire(self) -> Mapping[str, Any]:
        """Return the fields as a JSON-serialisable dictionary."""
        return {**asdict(self), "silent_ranks": list(self.silent_ranks)}
