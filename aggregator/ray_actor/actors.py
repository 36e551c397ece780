"""The Ray side of root and relays: how they are named, created once, found, placed, and how their processes end.

Every name has its own namespace, ``rankfold/NAME``, and in it every attempt its own actors, so that what an earlier
attempt left behind is neither joined nor ended. All actors are detached: no rank owns them.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any, Final

from aggregator.ray_actor.ledger import Mark
from aggregator.ray_actor.library import load_ray
from aggregator.ray_actor.membership import StepKey
from aggregator.ray_actor.messages import Joined, JoinRequest, Receipt, Refused
from aggregator.ray_actor.placing import ROOT, Plan
from aggregator.ray_actor.relay import Relay
from aggregator.ray_actor.root import ORPHAN_S, Root
from aggregator.ray_actor.status import ActorStatus

__all__ = ["ActorNames", "RelayActor", "RootActor", "find_actor", "find_or_create_root", "root_names"]

_NAMESPACE: Final = "rankfold/"
_ROOT_PREFIX: Final = "root-"
_LINGER_S: Final = 1.0
# Calls that wait inside of an actor: packets under way, and every rank once in attach and once in close.
_MIN_CALLS: Final = 4096


@dataclass(frozen=True)
class ActorNames:
    """The names of the actors of one attempt.

    Attributes:
        name: of the destination.
        attempt: nonce of the attempt.
    """

    name: str
    attempt: str

    @property
    def namespace(self) -> str:
        """Ray namespace of all attempts under the name."""
        return f"{_NAMESPACE}{self.name}"

    @property
    def root(self) -> str:
        """Name of the root inside of the namespace."""
        return f"{_ROOT_PREFIX}{self.attempt}"

    def relay(self, name: str) -> str:
        """Name of a relay inside of the namespace."""
        return f"{name}-{self.attempt}"

    def target(self, target: str) -> str:
        """Name of the root for ``ROOT``, else of a relay."""
        return self.root if target == ROOT else self.relay(target)


class RootActor:
    """The Ray actor around a :class:`Root`; its methods are those of the root."""

    def __init__(self, names: ActorNames, fan_in: int, orphan_s: float) -> None:
        self._names, self._fan_in, self._orphan_s = names, fan_in, orphan_s
        self._made: Root | None = None
        self._plan = Plan((), {})
        # Started again after all ranks have gone, it is never called.
        self._unused = threading.Timer(orphan_s, self._end_process)
        self._unused.daemon = True
        self._unused.start()

    @property
    def _root(self) -> Root:
        """The root, made by the first call, because only a call runs on the event loop."""
        if self._made is None:
            self._unused.cancel()
            self._made = Root(
                Mark(self._names.name, self._names.attempt),
                self._fan_in,
                self._start_relays,
                self._end_process,
                orphan_s=self._orphan_s,
                pickle_charter=load_ray().cloudpickle.dumps,
            )
        return self._made

    async def join(self, request: JoinRequest) -> Joined | Refused:
        return await self._root.join(request)

    async def deliver(self, data: bytes, previous: StepKey | None) -> Receipt:
        return await self._root.deliver(data, previous)

    async def close(self, rank: int, last: StepKey | None, num_abandoned: int) -> dict[str, Any] | None:
        return await self._root.close(rank, last, num_abandoned)

    async def farewell(self, rank: int) -> None:
        await self._root.farewell(rank)

    async def beat(self, rank: int) -> str:
        return await self._root.beat(rank)

    async def end(self, reason: str) -> dict[str, Any]:
        return await self._root.end(reason)

    async def status(self) -> ActorStatus:
        return await self._root.status()

    def _start_relays(self, plan: Plan) -> None:
        self._plan = plan
        for relay in plan.relays:
            fan_in_calls = max(_MIN_CALLS, 4 * len(relay.ranks))
            options = _options(self._names, self._names.relay(relay.name), relay.node, fan_in_calls, num_cpus=0)
            target = self._names.target(relay.target)
            _remote(RelayActor, options, self._names.namespace, target, relay.ranks)

    def _end_process(self) -> None:
        ray = load_ray()
        for relay in self._plan.relays:
            if (actor := find_actor(self._names, self._names.relay(relay.name))) is not None:
                ray.kill(actor, no_restart=True)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


class RelayActor:
    """The Ray actor around a :class:`Relay`."""

    def __init__(self, namespace: str, target: str, ranks: tuple[int, ...]) -> None:
        self._namespace, self._target, self._ranks = namespace, target, ranks
        self._relay: Relay | None = None
        self._above: Any = None

    async def deliver(self, data: bytes, previous: StepKey | None) -> Receipt:
        if self._relay is None:
            self._relay = Relay(self._ranks, self._send, _LINGER_S)
        return await self._relay.deliver(data, previous)

    async def _send(self, data: bytes, previous: StepKey | None) -> Receipt:
        if self._above is None:
            self._above = load_ray().get_actor(self._target, self._namespace)
        try:
            receipt: Receipt = await self._above.deliver.remote(data, previous)
        except BaseException:
            self._above = None
            raise
        return receipt

    async def process(self) -> int:
        return os.getpid()


def find_or_create_root(
    names: ActorNames, *, world_size: int, fan_in: int, node: str, num_cpus: float, orphan_s: float = ORPHAN_S
) -> Any:
    """Return the root of an attempt; whoever of its ranks comes first creates it, on its own node if that has room.

    Args:
        names: of the attempt.
        world_size: bounds how many calls may wait in it.
        fan_in: most packets of a step that an actor hears.
        node: preferred node.
        num_cpus: what it reserves. It takes no GPU.
        orphan_s: see :class:`aggregator.ray_actor.root.Root`.
    """
    options = _options(names, names.root, node, max(_MIN_CALLS, 4 * world_size), num_cpus)
    return _remote(RootActor, options, names, fan_in, orphan_s)


def find_actor(names: ActorNames, actor: str) -> Any | None:
    """Return an actor of the attempt by its name inside of the namespace, None if it is gone for good."""
    try:
        return load_ray().get_actor(actor, names.namespace)
    except ValueError:
        return None


def root_names(name: str) -> list[ActorNames]:
    """Return the names of all attempts that have a root under ``name``, left-over ones included."""
    known = load_ray().util.list_named_actors(all_namespaces=True)
    found = [entry["name"] for entry in known if entry["namespace"] == f"{_NAMESPACE}{name}"]
    return [ActorNames(name, root.removeprefix(_ROOT_PREFIX)) for root in found if root.startswith(_ROOT_PREFIX)]


def _options(names: ActorNames, actor: str, node: str, num_calls: int, num_cpus: float) -> dict[str, Any]:
    affinity = load_ray().util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=True)
    return {
        "name": actor,
        "namespace": names.namespace,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "max_task_retries": 0,
        "max_concurrency": num_calls,
        "num_cpus": num_cpus,
        "num_gpus": 0,
        "scheduling_strategy": affinity,
    }


def _remote(cls: type, options: dict[str, Any], *args: Any) -> Any:
    return load_ray().remote(cls).options(**options).remote(*args)
