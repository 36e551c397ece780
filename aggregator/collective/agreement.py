"""Attach: the offers of all ranks go up the tree, one verdict comes down, and every rank acts on the same one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from aggregator.collective.absence import attach_timeout
from aggregator.collective.ballot import Ballot
from aggregator.collective.frames import Frame, FrameKind, missing_from_wire, missing_to_wire
from aggregator.collective.inbox import Broken, Received
from aggregator.collective.record import Record
from aggregator.collective.tree import TreePosition
from aggregator.collective.waiting import Member, Waiting
from telemetry.errors import RankfoldError
from telemetry.protocol import AttachOffer, AttachReply

__all__ = ["agree"]


def agree(
    offer: AttachOffer, member: Member, record: Record | None, not_arrived: Callable[[], Mapping[int, str]]
) -> Waiting[AttachReply]:
    """Take part in the agreement of all ranks; every rank runs this once, on its merging thread.

    Args:
        offer: of this rank.
        member: this rank.
        record: on rank zero, to be claimed if all agree; None elsewhere.
        not_arrived: returns the ranks that never came (rank → how long they were waited for).

    Returns:
        The run and segment, equal on all ranks.

    Raises:
        RankfoldError: the ranks do not agree, one refuses, some did not come, or rank zero cannot write; the same
            error on every rank that can still be reached.
    """
    ballot, missing = yield from _collect(offer, member)
    if record is not None:
        body = _decide(offer, ballot, missing and (not_arrived() or missing), record)
    else:
        frame = Frame(FrameKind.OFFER, _to_body(ballot, missing))
        silent = {_parent(member.position): "did not answer"}
        verdict = yield from _ask_parent(member, frame)
        body = verdict or _refuse(attach_timeout(offer.rank, not_arrived() or silent))
    member.neighbours.send_down(Frame(FrameKind.VERDICT, body))
    if body["refusal"] is not None:
        raise RankfoldError.from_wire(body["refusal"])
    return AttachReply(**body["reply"])


def _collect(offer: AttachOffer, member: Member) -> Waiting[tuple[Ballot, dict[int, str]]]:
    position, neighbours = member.position, member.neighbours
    ballots: dict[int, Ballot] = {position.rank: Ballot.of(offer)}
    missing: dict[int, str] = {}
    deadline = member.clock() + member.waits.offers_s
    while any(child not in ballots and neighbours.is_alive(child) for child in position.children):
        event = yield deadline
        if event is None:
            break
        if isinstance(event, Broken):
            neighbours.forget(event.peer)
        elif isinstance(event, Received) and event.frame.kind is FrameKind.OFFER:
            ballots[event.peer] = Ballot.from_wire(event.frame.body["ballot"])
            missing.update(missing_from_wire(event.frame.body["missing"]))
    for child in position.children:
        if child not in ballots:
            missing.update(dict.fromkeys(position.below[child], "did not come to watch"))
    whole = Ballot()
    for rank in sorted(ballots):
        whole.add(ballots[rank])
    return whole, missing


def _decide(offer: AttachOffer, ballot: Ballot, missing: Mapping[int, str], record: Record) -> dict[str, Any]:
    """Return the verdict of rank zero."""
    refusal = attach_timeout(offer.rank, missing) if missing else ballot.refusal()
    if refusal is not None:
        return _refuse(refusal)
    try:
        reply = record.claim(ballot.agreed(offer), ballot.sites)
    except RankfoldError as error:
        return _refuse(error)
    except Exception as error:
        return _refuse(RankfoldError(f"rank zero cannot open the record: {type(error).__name__}: {error}", rank=0))
    return {"reply": vars(reply), "refusal": None}


def _ask_parent(member: Member, offer: Frame) -> Waiting[dict[str, Any] | None]:
    """Return the verdict, or None if the parent is lost or silent."""
    neighbours, deadline = member.neighbours, member.clock() + member.waits.verdict_s
    neighbours.send_up(offer)
    while neighbours.is_alive(_parent(member.position)) and (event := (yield deadline)) is not None:
        if isinstance(event, Broken):
            neighbours.forget(event.peer)
        elif isinstance(event, Received) and event.frame.kind is FrameKind.VERDICT:
            return dict(event.frame.body)
    return None


def _parent(position: TreePosition) -> int:
    assert position.parent is not None, "the root asks nobody"
    return position.parent


def _refuse(error: RankfoldError) -> dict[str, Any]:
    return {"reply": None, "refusal": error.to_wire()}


def _to_body(ballot: Ballot, missing: Mapping[int, str]) -> dict[str, Any]:
    return {"ballot": ballot.to_wire(), "missing": missing_to_wire(missing)}
