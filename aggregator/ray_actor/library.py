"""Ray itself: imported here and nowhere else, when it is needed."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

from telemetry.errors import AggregatorUnavailableError

__all__ = ["INSTALL", "connect", "is_worker_process", "job_key", "job_of_this_process", "load_ray"]

INSTALL = "pip install 'rankfold[ray]'"

_HEAD = "node:__internal_head__"


def load_ray() -> Any:
    """Return the module ``ray``.

    Raises:
        AggregatorUnavailableError: it is not installed.
    """
    try:
        import ray
        import ray.exceptions
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise AggregatorUnavailableError(
            f"a destination ray://NAME needs Ray, which is not installed: {error}", remedy=INSTALL
        ) from error
    module: ModuleType = ray
    return module


def connect() -> Any:
    """Return the module ``ray``, connected to a cluster: the one of this worker, or the one of this machine.

    Raises:
        AggregatorUnavailableError: Ray is not installed, or no cluster runs.
    """
    ray = load_ray()
    if not ray.is_initialized():
        try:
            ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=True)
        except ConnectionError as error:
            raise AggregatorUnavailableError(
                f"no Ray cluster was found: {error}",
                remedy="run inside of a Ray job, call ray.init first, or begin a cluster with `ray start --head`",
            ) from error
    return ray


def job_of_this_process() -> str:
    """Return what all attempts of one Ray Train run have in common, "" outside of Ray Train.

    Job ids repeat from cluster to cluster, so the id of the head node is part of it.
    """
    train = sys.modules.get("ray.train")
    if train is None:
        return ""
    try:
        return job_key(train.get_context().get_experiment_name())
    except Exception:  # Ray tells in several ways that this process is no worker of a training run.
        return ""


def job_key(experiment: str) -> str:
    """Return what :func:`job_of_this_process` returns in the workers of a Ray Train run of this name."""
    ray = load_ray()
    heads = [node["NodeID"] for node in ray.nodes() if _HEAD in node["Resources"]]
    return f"{min(heads, default='')}/{ray.get_runtime_context().get_job_id()}/{experiment}"


def is_worker_process() -> bool:
    """Tell whether this process is one that Ray has started, whose working directory is not that of the driver."""
    context = load_ray().get_runtime_context()
    return bool(context.get_actor_id() or context.get_task_id())
