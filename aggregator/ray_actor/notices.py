"""Findings about the ranks themselves: who joined, left or came late, and that the actor was started again."""

from __future__ import annotations

import socket
from typing import Any

from aggregator.collective.absence import name_ranks
from aggregator.ray_actor.membership import StepKey
from telemetry.packet import Packet

__all__ = ["joined", "late", "left", "restarted"]


def late(packet: Packet) -> dict[str, Any]:
    """Return what there is to say about a packet that came too late."""
    ranks = list(packet.ranks)
    text = f"{name_ranks(ranks)} brought a packet after its step had been written without it"
    return {"code": "late_packet", "message": text, "ranks": ranks, "late_step": packet.step}


def joined(rank: int, after: StepKey | None) -> dict[str, Any]:
    """Return what there is to say about a rank that takes part after step ``after``."""
    when = "from the first step on" if after is None else f"after step {after[1]}"
    return {"code": "world_changed", "message": f"rank {rank} joined {when}", "ranks": [rank]}


def left(rank: int, last: StepKey | None) -> dict[str, Any]:
    """Return what there is to say about a rank that closed after step ``last`` while others went on."""
    when = "before its first step" if last is None else f"after step {last[1]}"
    return {"code": "world_changed", "message": f"rank {rank} left {when}", "ranks": [rank]}


def restarted() -> dict[str, Any]:
    """Return what there is to say about an actor that goes on where an earlier incarnation ended."""
    text = f"the actor of this run was started again, on {socket.gethostname()}, and went on with the record"
    return {"code": "aggregator_restarted", "message": text}
