"""A rendezvous for torchrun that also numbers the attempts of a job, equally on all nodes.

torchrun counts restarts in the agent of each node: after a node was replaced, or joined late, the counts differ, and a
change of membership is not counted at all. Here the agents agree in the store of each round on the job's name, the
number of the attempt and a nonce, and hand them to their ranks by environment. Everything else is torchrun's own
``c10d`` rendezvous. Registered with torchrun under the name ``rankfold``, through its entry point for plug-ins.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable, MutableMapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from aggregator.history.attempt import ATTEMPT_VARIABLE, JOB_VARIABLE, NONCE_VARIABLE
from launch.background import Background
from telemetry.errors import ConfigurationError

__all__ = ["Attempt", "AttemptRendezvous", "agree", "plugin"]

BACKEND: Final = "rankfold"
_TO_VARIABLE: Final = "RANKFOLD_TO"
_AGREED: Final = "rankfold/attempt"
_ANSWER_S: Final = 1.0
_GOODBYE_S: Final = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks of a job.

    Attributes:
        job: name of the job, equal for all its attempts.
        number: how many attempts there were before, over all nodes and restarts of them.
        nonce: of this attempt alone.
    """

    job: str
    number: int
    nonce: str

    def export(self, environ: MutableMapping[str, str]) -> None:
        """Hand the attempt to the processes that are started from here."""
        environ[JOB_VARIABLE] = self.job
        environ[ATTEMPT_VARIABLE] = str(self.number)
        environ[NONCE_VARIABLE] = self.nonce


def agree(
    store: Any, node: int, num_nodes: int, *, job: str, to: str, last: int, find_last: Callable[[str], int]
) -> Attempt:
    """Agree with all nodes of this round on the attempt. Called by the agent of every node, once a round.

    Args:
        store: of this round alone; its own timeout bounds the waiting.
        node, num_nodes: of this round.
        job: name of the job if this node knows it, else "".
        to: destination of the record that this node was given, "" if none.
        last: number of the last attempt that this node took part in, -1 if none.
        find_last: returns the number of the last attempt of a job that the record knows, -1 if none; called on the
            first node, and only if it did not make up the job's name.

    Raises:
        ConfigurationError: the nodes were given different jobs or destinations; all of them raise it.
    """
    store.set(f"rankfold/node/{node}", json.dumps({"job": job, "to": to, "last": last}))
    if node == 0:
        told = [json.loads(store.get(f"rankfold/node/{other}")) for other in range(num_nodes)]
        store.set(_AGREED, json.dumps(_decide(told, find_last)))
    agreed = json.loads(store.get(_AGREED))
    if "refusal" in agreed:
        raise ConfigurationError(agreed["refusal"], remedy="start the job with the same options on every node")
    return Attempt(**agreed)


def _decide(told: list[dict[str, Any]], find_last: Callable[[str], int]) -> dict[str, Any]:
    for name, word in (("job", "--job"), ("to", "--to")):
        # A node that joins in place of a lost one has not made up a name; it takes that of the others.
        given = {node: one[name] for node, one in enumerate(told) if one[name] or name == "to"}
        if len(set(given.values())) > 1:
            shown = ", ".join(f"{value or 'none'} on node {node}" for node, value in given.items())
            return {"refusal": f"the nodes do not agree on {word}: {shown}"}
    job = next((one["job"] for one in told if one["job"]), "")
    last = max(one["last"] for one in told)
    if job and last < 0:
        last = find_last(job)
    return {"job": job or secrets.token_hex(8), "number": last + 1, "nonce": secrets.token_hex(16)}


class AttemptRendezvous(RendezvousHandler):
    """torchrun's rendezvous with the agreement on the attempt behind it. Lives in the agent of each node.

    While ranks run, the agent asks again and again whether other nodes wait to join, and torchrun's own rendezvous
    answers when the store does. On a link that is cut that takes its read timeout, a minute, in which the agent sees
    neither the end of its ranks nor a signal, and then again at its end. So the store is asked on a thread of its own:
    no answer means that no node waits, and an agent that ends tells the others if it can.
    """

    def __init__(self, inner: Any, environ: MutableMapping[str, str]) -> None:
        """Wrap a handler.

        Args:
            inner: a ``RendezvousHandler`` that does all that torchrun asks for.
            environ: of the agent, read for the job and the destination, and written for the ranks.
        """
        self._inner, self._environ = inner, environ
        # Read by torchrun's own handlers, which would otherwise give the ranks the address of the shared store.
        environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self._job, self._last = environ.get(JOB_VARIABLE, ""), -1
        self._background = Background("rankfold-rendezvous")
        self._asked: Future[int] | None = None
        self._lost: Exception | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other nodes and agree with them on the attempt; see the base class."""
        if self._asked is not None and self._lost is None:
            self._settle(self._asked)
        if self._lost is not None:
            raise RendezvousConnectionError(
                "the store of the rendezvous was lost; start this node again"
            ) from self._lost
        info: RendezvousInfo = self._inner.next_rendezvous()
        to = self._environ.get(_TO_VARIABLE, "")
        attempt = agree(
            info.store,
            info.rank,
            info.world_size,
            job=self._job,
            to=to,
            last=self._last,
            find_last=lambda job: _last_recorded(to, job),
        )
        self._job, self._last = attempt.job, attempt.number
        attempt.export(self._environ)
        return info

    @property
    def use_agent_store(self) -> bool:
        """Never: with gloo, the keys that a broken attempt left in a shared store break the next one."""
        return False

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait to join, as far as the store has answered; see the base class."""
        if self._lost is not None:
            return 0
        if self._asked is None:
            self._asked = self._background.submit(self._inner.num_nodes_waiting)
        if not wait([self._asked], _ANSWER_S).done:
            return 0
        return self._settle(self._asked)

    def _settle(self, asked: Future[int]) -> int:
        """Take the answer of the store; without one it is not asked again, because a late answer confuses the next."""
        self._asked = None
        try:
            return asked.result()
        except RendezvousError as error:
            self._lost = error
            _log.warning(
                "the store of the rendezvous does not answer; the ranks go on, but no node can join: %s", error
            )
            return 0

    def shutdown(self) -> bool:
        """Tell the other nodes that this one has ended, if they can be reached soon; see the base class."""
        if self._lost is None:
            told = self._background.submit(self._inner.shutdown)
            if wait([told], _GOODBYE_S).done:
                return bool(told.result())
        _log.warning("the store of the rendezvous does not answer; other nodes find out for themselves that this ended")
        return False

    def get_backend(self) -> str:
        """Return the name of this rendezvous."""
        return BACKEND

    def is_closed(self) -> bool:
        """See the base class."""
        return bool(self._inner.is_closed())

    def set_closed(self) -> None:
        """See the base class."""
        self._inner.set_closed()

    def get_run_id(self) -> str:
        """See the base class."""
        return str(self._inner.get_run_id())


def _last_recorded(to: str, job: str) -> int:
    if not to or "://" in to:
        return -1
    from aggregator.history.claim import last_attempt

    attempt = last_attempt(Path(to))
    return int(attempt["restarts"][-1]) if attempt is not None and attempt["job"] == [None, job] else -1


def plugin() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return what torchrun calls for a handler; torchrun calls this when it starts."""
    return _create


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    inner = RendezvousParameters(
        backend="c10d",
        endpoint=parameters.endpoint,
        run_id=parameters.run_id,
        min_nodes=parameters.min_nodes,
        max_nodes=parameters.max_nodes,
        local_addr=parameters.local_addr,
        **parameters.config,
    )
    return AttemptRendezvous(get_rendezvous_handler(inner), os.environ)
