"""What ranks and actors say to each other; Ray carries these objects, and packets inside of them as versioned bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from aggregator.collective.account import Account
from telemetry.errors import RankfoldError
from telemetry.protocol import AttachOffer, AttachReply

__all__ = ["Charter", "JoinRequest", "Joined", "Receipt", "Refused", "State"]


@dataclass(frozen=True)
class Charter:
    """What all ranks have agreed on; every rank keeps it, so that any of them can tell it to an actor started again.

    Attributes:
        offer: rank zero's, with an absolute directory as ``to``.
        job: see :class:`aggregator.ray_actor.ledger.Mark`.
        nodes: rank → the node that it runs on, those of the first agreement.
    """

    offer: AttachOffer
    job: str
    nodes: Mapping[int, str]


@dataclass(frozen=True)
class JoinRequest:
    """What one rank brings to attach, and again to every incarnation of the actor.

    Attributes:
        rank, world_size: of this process.
        token: drawn by the process, tells it from another one of the same rank.
        node: Ray's id of its node.
        attach_s: how long to wait for all ranks.
        ballot: see :class:`aggregator.collective.ballot.Ballot`, as JSON; with all sites that the rank has defined.
        charter: a pickled :class:`Charter`: rank zero's proposal, or what was agreed on; None elsewhere.
        is_agreed: whether the rank has been through an agreement of this attempt.
    """

    rank: int
    world_size: int
    token: str
    node: str
    attach_s: float
    ballot: Mapping[str, Any]
    charter: bytes | None = None
    is_agreed: bool = False


@dataclass(frozen=True)
class Joined:
    """A rank takes part.

    Attributes:
        reply: run and segment.
        charter: to be kept, see :class:`JoinRequest`.
        target: name of the actor to deliver to.
        incarnation: of the actor that answers.
    """

    reply: AttachReply
    charter: bytes
    target: str
    incarnation: str


@dataclass(frozen=True)
class Refused:
    """A rank does not take part; the same error for all ranks of an attach."""

    error: RankfoldError


class State(Enum):
    """What became of a delivery."""

    DURABLE = "durable"
    """It is in the record, or was already."""
    LATE = "late"
    """Its step had been written without it."""
    UNKNOWN = "unknown"
    """This incarnation does not know the rank: join, then deliver again."""
    CROSSING = "crossing"
    """A merged packet overlaps another: deliver its parts one by one."""
    STOPPED = "stopped"
    """Merging has stopped, or the packet can never be merged; ``error`` says why."""


@dataclass(frozen=True)
class Receipt:
    """The answer to a delivery.

    Attributes:
        state: what became of it.
        account: totals of the record, where something was written.
        error: why merging has stopped.
    """

    state: State
    account: Account | None = None
    error: RankfoldError | None = None
