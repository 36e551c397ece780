"""What the Ray backend costs and carries: training thread, one actor, a tree of actors, and a model of 10,000 ranks.

A Ray cluster of its own on this machine; producers are processes, each with a real aggregator that delivers packets of
real width to a real actor, which merges them and commits every step to disk.

- *submit*: what a logged step adds to the training thread. Measured on a producer that paces itself, so that its queue
  never fills.
- *root*: steps a second until every rank knows that they are durable, with producers that keep eight steps under way,
  and the processor time that the root itself takes for a step. On a machine with fewer cores than processes the first
  is a lower bound; the second is what a root with a core of its own is limited by.
- *tree*: the same with relays between producers and root.
- *model*: root time a step = a + b × packets, fitted to the runs without relays, and taken for relays too.

    python benchmarks/bench_ray.py [--producers 2 4 8] [--sites 500] [--steps 200]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import ray

from aggregator.ray_actor import RayAggregator
from aggregator.ray_actor.placing import plan_relays
from aggregator.ray_actor.query import read_status
from bench_merge import Case, make_packet, make_sites
from machine import describe_machine
from telemetry.protocol import AttachOffer, Deadlines
from telemetry.summary import DEFAULT_DESCRIPTOR

TARGET_SUBMIT_US: Final = 200.0
DEADLINES: Final = Deadlines(attach_s=180, merge_s=120, close_s=120)
UNDER_WAY: Final = 8
FAN_IN: Final = 64
PACE_S: Final = 0.02
CALL_S: Final = 500.0
_TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Flow:
    """One run of producers.

    Attributes:
        case: sites, ranks, rounds; fan_in: of the tree.
        packet_bytes: of one rank and step.
        wall_s: from the first submit until the last step was durable, the slowest rank.
        root_cpu_s: processor time of the root meanwhile.
    """

    case: Case
    fan_in: int
    packet_bytes: int
    wall_s: float
    root_cpu_s: float

    @property
    def steps_per_s(self) -> float:
        return self.case.num_rounds / self.wall_s

    @property
    def root_ms(self) -> float:
        """Processor time of the root a step, in milliseconds."""
        return 1e3 * self.root_cpu_s / self.case.num_rounds

    @property
    def heard(self) -> int:
        """Packets of a step that the root hears."""
        plan = plan_relays(dict.fromkeys(range(self.case.world_size), "node"), self.fan_in)
        return sum(relay.target == "" for relay in plan.relays) or self.case.world_size


@ray.remote(num_cpus=0)
class Producer:
    """One rank."""

    def __init__(self, rank: int, case: Case, name: str, directory: str, fan_in: int) -> None:
        self._sites = make_sites(case.num_sites)
        self._rank, self._case = rank, case
        self._aggregator = RayAggregator(name, directory, attempt="bench", fan_in=fan_in)

    def attach(self) -> int:
        """Attach; returns the size of a packet in bytes."""
        offer = AttachOffer(self._rank, self._case.world_size, "", {}, DEFAULT_DESCRIPTOR, self._sites)
        reply = self._aggregator.attach(replace(offer, deadlines=DEADLINES, health=False))
        made = make_packet(self._rank, self._case, self._sites)
        self._packet = replace(made, run_id=reply.run_id, segment=reply.segment)
        return len(self._packet.to_bytes())

    def flow(self, first: int, last: int) -> float:
        """Submit steps, at most ``UNDER_WAY`` ahead; returns seconds until the last is durable."""
        begun = time.perf_counter()
        for step in range(first, last + 1):
            self._wait(UNDER_WAY - 1)
            self._aggregator.submit(replace(self._packet, step=step))
        self._wait(0)
        return time.perf_counter() - begun

    def pace(self, first: int, last: int) -> list[float]:
        """Submit steps at a steady pace; returns the seconds of each call."""
        times = []
        for step in range(first, last + 1):
            packet = replace(self._packet, step=step)
            begun = time.perf_counter()
            self._aggregator.submit(packet)
            times.append(time.perf_counter() - begun)
            time.sleep(PACE_S)
        self._wait(0)
        return times

    def close(self) -> int:
        """Close; returns how many steps were committed with all ranks."""
        report = self._aggregator.close()
        return report.num_committed - report.num_partial

    def _wait(self, most: int) -> None:
        delivery = self._aggregator._delivery
        assert delivery is not None, "attach comes first"
        while self._aggregator._num_submitted - delivery.counts.num_settled > most:
            time.sleep(0.0005)


@contextmanager
def job(case: Case, fan_in: int) -> Iterator[tuple[list[Any], int]]:
    """Start producers and attach them; yields them and the size of a packet, checks the record, closes."""
    name = f"bench-{time.time_ns()}"
    with tempfile.TemporaryDirectory(prefix="bench-ray-") as folder:
        made = [Producer.remote(rank, case, name, f"{folder}/run", fan_in) for rank in range(case.world_size)]
        sizes = ray.get([producer.attach.remote() for producer in made], timeout=CALL_S)
        try:
            yield [name, *made], sizes[0]
            committed = ray.get([producer.close.remote() for producer in made], timeout=CALL_S)
            assert min(committed) >= case.num_rounds, committed
        finally:
            for producer in made:
                ray.kill(producer)


def measure_flow(case: Case, fan_in: int) -> Flow:
    """Run producers as fast as the actor takes their steps."""
    with job(case, fan_in) as ((name, *producers), size):
        ray.get([producer.flow.remote(1, 10) for producer in producers], timeout=CALL_S)
        before = _cpu_s(name)
        calls = [producer.flow.remote(11, 10 + case.num_rounds) for producer in producers]
        wall_s = max(ray.get(calls, timeout=CALL_S))
        return Flow(case, fan_in, size, wall_s, _cpu_s(name) - before)


def measure_submit(case: Case) -> list[float]:
    """Return the seconds of each submit on all ranks."""
    with job(case, FAN_IN) as ((_, *producers), _):
        ray.get([producer.pace.remote(1, 10) for producer in producers], timeout=CALL_S)
        calls = [producer.pace.remote(11, 10 + case.num_rounds) for producer in producers]
        return [seconds for times in ray.get(calls, timeout=CALL_S) for seconds in times]


def _cpu_s(name: str) -> float:
    (status,) = read_status(f"ray://{name}")
    fields = Path(f"/proc/{status.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def measure_and_print(runs: Iterable[tuple[Case, int]]) -> list[Flow]:
    """Measure flows one after the other, each a row of the table as soon as it is there."""
    _print_header(
        "sites", "histograms", "producers", "root hears", "steps/s", "packets/s", "MB/s", "root, ms a step", "on a core"
    )
    flows = []
    for case, fan_in in runs:
        flow = measure_flow(case, fan_in)
        packets = flow.steps_per_s * case.world_size
        alone = 1e3 / flow.root_ms * case.world_size if flow.root_ms else float("inf")
        _print_row(
            case.num_sites,
            _yes(case.has_histograms),
            case.world_size,
            flow.heard,
            f"{flow.steps_per_s:.0f}",
            f"{packets:.0f}",
            f"{packets * flow.packet_bytes / 1e6:.1f}",
            f"{flow.root_ms:.1f}",
            f"{alone:.0f}",
        )
        flows.append(flow)
    return flows


def print_model(flows: Sequence[Flow]) -> None:
    """Fit root time = a + b × packets to the runs without relays, and print what it says of large worlds."""
    for has_histograms in (False, True):
        direct = [f for f in flows if f.case.has_histograms == has_histograms and f.heard == f.case.world_size]
        if len(direct) < 2:
            continue
        packets, measured = np.array([f.heard for f in direct]), np.array([f.root_ms for f in direct])
        b, a = np.polyfit(packets, measured, 1)
        error = 100 * np.abs((a + b * packets) / measured - 1).max()
        print(
            f"\nhistograms {_yes(has_histograms)}: root, ms a step = {a:.2f} + {b:.2f} × packets, error ≤ {error:.0f} %"
        )
        _print_header(
            "ranks", "relays", "above them", "root hears", "root, ms", "slowest actor, ms", "steps/s", "tree, ms"
        )
        for ranks in (8, 64, 512, 10_000):
            plan = plan_relays({rank: str(rank // 8) for rank in range(ranks)}, FAN_IN)
            levels = [relay.name.split("-")[1] for relay in plan.relays]
            heard = sum(relay.target == "" for relay in plan.relays) or ranks
            below = [8] * ("0" in levels) + [FAN_IN] * ("1" in levels)
            times = [a + b * children for children in (*below, heard)]
            _print_row(
                f"{ranks:,}",
                levels.count("0"),
                levels.count("1"),
                heard,
                f"{times[-1]:.0f}",
                f"{max(times):.0f}",
                f"{1e3 / max(times):.1f}",
                f"{sum(times):.0f}",
            )


def _print_header(*names: str) -> None:
    print()
    _print_row(*names)
    print("|---" * len(names) + "|")


def _print_row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


def main() -> None:
    """Run the measurements and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--producers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--sites", type=int, default=500)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    print(describe_machine(), f"load {os.getloadavg()[0]:.1f}")
    # A cluster of its own, whatever else runs on this machine.
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=300_000_000, log_to_driver=False)
    submits = measure_submit(Case(2, args.sites, False, args.steps))
    in_us = sorted(1e6 * seconds for seconds in submits)
    median, p99 = statistics.median(in_us), in_us[int(0.99 * len(in_us))]
    print(
        f"\nsubmit, {args.sites} sites, 2 producers: median {median:.0f} µs, p99 {p99:.0f} µs of {len(in_us)} calls; "
        f"target, median under {TARGET_SUBMIT_US:.0f} µs: {'met' if median < TARGET_SUBMIT_US else 'missed'}"
    )
    cases = [Case(n, args.sites, h, args.steps // (4 if h else 1)) for h in (False, True) for n in args.producers]
    runs = [(case, FAN_IN) for case in cases]
    widest = [case for case in cases if case.world_size == max(args.producers)]
    runs += [(case, fan_in) for case in widest for fan_in in (4, 2) if case.world_size > fan_in]
    flows = measure_and_print(runs)
    print_model(flows)
    print(f"\nload at the end {os.getloadavg()[0]:.1f}")
    ray.shutdown()


if __name__ == "__main__":
    main()
