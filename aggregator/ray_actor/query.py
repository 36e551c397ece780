"""Asking the actors of a run how they are, from any process of the cluster."""

from __future__ import annotations

from aggregator.ray_actor.actors import root_names
from aggregator.ray_actor.destination import RayDestination
from aggregator.ray_actor.library import connect
from aggregator.ray_actor.status import ActorStatus

__all__ = ["read_status"]


def read_status(to: str, timeout_s: float = 10.0) -> list[ActorStatus]:
    """Ask all actors under ``to`` (``ray://NAME``) how they are; left-over ones of earlier attempts included.

    Args:
        to: a destination.
        timeout_s: for all answers; an actor that gives none in time is left out.

    Raises:
        ConfigurationError: ``to`` is no destination.
        AggregatorUnavailableError: Ray is not installed, or no cluster runs.
    """
    name = RayDestination.parse(to).name
    ray = connect()
    calls = []
    for names in root_names(name):
        try:
            calls.append(ray.get_actor(names.root, names.namespace).status.remote())
        except ValueError:
            continue  # It ended since it was listed.
    ready, _ = ray.wait(calls, num_returns=len(calls), timeout=timeout_s) if calls else ([], [])
    found = []
    for call in ready:
        try:
            found.append(ray.get(call))
        except ray.exceptions.RayActorError:
            continue
    return sorted(found, key=lambda status: status.up_s)
