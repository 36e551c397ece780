"""A Ray cluster of the tests' own, and the ranks that meet in it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

# Read by Ray when it is imported, and by the processes that it starts.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")

import pytest
import ray
from ray.cluster_utils import Cluster

from aggregator.ray_actor import RayAggregator
from aggregator.ray_actor.actors import ActorNames
from aggregator.ray_actor.query import read_status
from aggregator.ray_actor.status import ActorStatus
from telemetry.packet import Packet
from telemetry.protocol import AttachReply, CloseReport, Deadlines
from tests.collective.worlds import offer
from tests.packets import make_packet

__all__ = [
    "IMPATIENT",
    "PATIENT",
    "Cluster",
    "Rank",
    "connected",
    "in_parallel",
    "root_of",
    "started_cluster",
    "status_of",
    "wait_until",
    "world",
]

ROOT = Path(__file__).resolve().parents[2]
OBJECT_STORE_BYTES = 150_000_000
PATIENT = Deadlines(attach_s=60, merge_s=40, close_s=40)
# For tests in which a deadline has to pass; all others must not depend on how busy the machine is.
IMPATIENT = Deadlines(attach_s=60, merge_s=1.5, close_s=30)


@contextmanager
def started_cluster(num_cpus: int = 4) -> Iterator[Cluster]:
    """Start a cluster of one node and connect to it; further nodes can be added and removed."""
    options: dict[str, Any] = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("PYTHONPATH", str(ROOT))
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": num_cpus, **options})
        try:
            with connected(cluster.address):
                yield cluster
        finally:
            cluster.shutdown()


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Be a driver of the cluster at ``address``."""
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    try:
        yield
    finally:
        ray.shutdown()


class Rank:
    """One rank: an attached aggregator that brings packets of known values. Usable as it is, or as a Ray actor."""

    def __init__(self, rank: int, world_size: int, name: str, directory: str, attempt: str, **options: Any) -> None:
        self.rank, self.world_size = rank, world_size
        self.aggregator = RayAggregator(name, directory, attempt=attempt, **options)
        self.reply: AttachReply | None = None
        self.segment: dict[str, Any] = {}

    def attach(self, deadlines: Deadlines = PATIENT, **changes: Any) -> AttachReply:
        self.reply = self.aggregator.attach(offer(self.rank, self.world_size, deadlines, **changes))
        return self.reply

    def packet(self, step: int, **changes: Any) -> Packet:
        """The packet of this rank: sites ``a`` and, on odd ranks, ``b``."""
        assert self.reply is not None, "attach comes first"
        values = {"a": [float(self.rank), float(step)], **({"b": [1.0]} if self.rank % 2 else {})}
        made = make_packet(self.rank, self.world_size, step, values, **changes)
        return replace(made, run_id=self.reply.run_id, **{"segment": self.reply.segment, **self.segment})

    def submit(self, step: int) -> None:
        self.aggregator.submit(self.packet(step))

    def begin_segment(self, resume_step: int) -> None:
        """Go on in the next segment, as a session does that goes back to an earlier step."""
        assert self.reply is not None, "attach comes first"
        number = self.segment.get("segment", self.reply.segment)
        self.segment = {"segment": number + 1, "resume_step": resume_step}

    def num_waiting(self) -> int:
        """Packets without an answer."""
        delivery = self.aggregator._delivery
        assert delivery is not None, "attach comes first"
        return self.aggregator._num_submitted - delivery.counts.num_settled

    def wait_until_settled(self, deadline_s: float = 40.0) -> None:
        wait_until(lambda: self.num_waiting() == 0, deadline_s)

    def failure(self) -> Any:
        return self.aggregator.failure

    def close(self) -> CloseReport:
        return self.aggregator.close()

    def pid(self) -> int:
        return os.getpid()


def world(world_size: int, name: str, directory: Path, attempt: str = "attempt", **options: Any) -> list[Rank]:
    """Return ranks that live in threads of this process."""
    return [Rank(rank, world_size, name, str(directory), attempt, **options) for rank in range(world_size)]


def in_parallel(calls: Sequence[Callable[[], Any]], deadline_s: float = 90.0) -> list[Any]:
    """Make calls at once and return what they return, or the exceptions that they raise."""
    results: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + deadline_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), "a call did not return"
    return results


def wait_until(condition: Callable[[], Any], deadline_s: float = 40.0) -> None:
    """Wait for what another process brings about."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def status_of(name: str) -> ActorStatus:
    """Return the status of the only attempt under a name."""
    (status,) = read_status(f"ray://{name}")
    return status


def root_of(name: str, attempt: str = "attempt") -> Any:
    """Return the handle of a root."""
    names = ActorNames(name, attempt)
    return ray.get_actor(names.root, names.namespace)
