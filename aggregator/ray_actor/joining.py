"""The rank's side of attach: what it brings to the actor, and how it asks for the verdict."""

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from typing import Any, Final

from aggregator.collective.absence import attach_timeout
from aggregator.collective.ballot import Ballot
from aggregator.ray_actor.library import job_of_this_process, load_ray
from aggregator.ray_actor.messages import Charter, Joined, JoinRequest, Refused
from aggregator.sinks.runner import require_valid_sinks
from telemetry.errors import RankfoldError, SinkUnavailableError
from telemetry.protocol import AttachOffer, Deadlines

__all__ = ["ask", "make_request"]

# Beyond attach_s, for the process of the actor to start, which imports torch, and to name who has not come.
_START_S: Final = 45.0
_RETRY_S: Final = 0.2


def make_request(offer: AttachOffer, node: str) -> JoinRequest:
    """Return what a rank brings; a sink that cannot travel becomes its refusal, which all ranks then raise.

    Args:
        offer: of this rank, with an absolute directory as ``to``.
        node: Ray's id of its node.
    """
    charter = None
    if offer.rank == 0:
        charter, failure = _propose(offer)
        offer = replace(offer, failure=offer.failure or failure)
    return JoinRequest(
        rank=offer.rank,
        world_size=offer.world_size,
        token=secrets.token_hex(8),
        node=node,
        attach_s=offer.deadlines.attach_s,
        ballot=Ballot.of(offer).to_wire(),
        charter=charter,
    )


def _propose(offer: AttachOffer) -> tuple[bytes, RankfoldError | None]:
    """Return rank zero's charter, and what it has to refuse; a session that is turned off needs a charter even so."""
    pickle, job = load_ray().cloudpickle.dumps, job_of_this_process()
    try:
        require_valid_sinks(offer.sinks)
        return pickle(Charter(offer, job, {})), None
    except RankfoldError as error:
        failure = error
    except Exception as error:
        failure = _cannot_travel(error)
    return pickle(Charter(replace(offer, sinks=(), health=False, failure=None), job, {})), failure


def ask(actor: Any, request: JoinRequest, deadlines: Deadlines) -> Joined:
    """Join for the first time, through restarts of the actor.

    Raises:
        AttachTimeoutError: no verdict within ``attach_s`` and the time that the actor needs to start.
        RankfoldError: the verdict is a refusal.
    """
    ray = load_ray()
    deadline = time.monotonic() + deadlines.attach_s + _START_S
    while True:
        try:
            answer = ray.get(actor.join.remote(request), timeout=max(0.1, deadline - time.monotonic()))
        except ray.exceptions.GetTimeoutError as error:
            raise attach_timeout(request.rank, {0: "gave no verdict through the actor"}) from error
        except ray.exceptions.RayActorError as error:
            if time.monotonic() > deadline:
                raise attach_timeout(request.rank, {0: f"has no actor: {error}"}) from error
            time.sleep(_RETRY_S)
            continue
        except ray.exceptions.RayError as error:
            raise RankfoldError(f"the actor failed at attach: {error}", rank=request.rank) from error
        if isinstance(answer, Refused):
            raise answer.error
        assert isinstance(answer, Joined)
        return answer


def _cannot_travel(error: Exception) -> SinkUnavailableError:
    return SinkUnavailableError(
        f"a sink or the health thresholds cannot be sent to the actor: {type(error).__name__}: {error}",
        rank=0,
        remedy="give sinks that pickle until they are opened",
    )
