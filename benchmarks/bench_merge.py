"""What a logged step costs to merge over ranks, against all_reduces, and what that means for 10,000 ranks.

Real processes on this machine, one gloo group, three ways to make one record of the same rows:

- *merge*: a packet of every rank goes through the collective aggregator, from ``submit`` until every rank knows that
  the step is recorded. Training does not wait for this; what it does wait for is the column *submit*.
- *packed*: three all_reduces of packed rows (int64 sum, float64 sum, float64 max). It gives sums and extremes, but no
  central moments, no ranks of extremes, no coverage; and it hangs or aborts where ranks differ in their sites.
- *each*: one all_reduce for each site, as hooks by hand do; timed on 200 sites at most and scaled to all of them.

The three run interleaved, in an order that rotates; the table shows medians over the rounds. The recorder keeps
nothing, so that the merge alone is measured.

    python benchmarks/bench_merge.py [--worlds 2 4 8] [--sites 50 500 5000] [--rounds 15]
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from aggregator.catalogue import MergedStep
from aggregator.collective import CollectiveAggregator
from aggregator.collective.tree import plan_tree
from aggregator.merge import merge_packets
from machine import describe_machine
from telemetry.packet import Packet
from telemetry.presence import Presence
from telemetry.protocol import AttachOffer, AttachReply, Deadlines, SinkReport
from telemetry.replicas import DIGEST_FIELDS, ReplicaTable
from telemetry.sites import SiteSpec
from telemetry.summary import DEFAULT_DESCRIPTOR
from telemetry.summary.fields import FINITE, NUM_FLOATS, NUM_INTS, TOTAL

WAYS = ("merge", "packed", "each")
TARGET_SUBMIT_US = 100.0
DEADLINES = Deadlines(attach_s=120, merge_s=120, close_s=60)
FAN_IN = 16
MAX_EACH = 200
# For all ranks of a case: beyond, the machine is too small for it.
CASE_S = 400.0


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    world_size: int
    num_sites: int
    has_histograms: bool
    num_rounds: int


class NullRecorder:
    """Stands where the history is; keeps nothing."""

    failure = None

    def claim(self, offer: AttachOffer) -> AttachReply:
        return AttachReply("bench", 0)

    def guard(self) -> None:
        """Nothing is held."""

    def append(self, step: MergedStep) -> Future[MergedStep]:
        """Forget the step."""
        done: Future[MergedStep] = Future()
        done.set_result(step)
        return done

    def flush(self) -> None:
        """Nothing is held."""

    def close(self, deadline_s: float) -> tuple[SinkReport, ...]:
        return ()

    def abort(self) -> None:
        """Nothing is held."""


def make_sites(num_sites: int) -> tuple[SiteSpec, ...]:
    """Return gradients of a model in which every rank has every site."""
    specs = (
        SiteSpec(f"layers.{i}.weight", "gradient", "float32", (1024,), 1024, (("dp", "replica"),))
        for i in range(num_sites)
    )
    return tuple(sorted(specs, key=lambda site: site.site_id))


def make_packet(rank: int, case: Case, sites: tuple[SiteSpec, ...]) -> Packet:
    """Return what a rank logs: every site observed, with the fingerprints of replicas."""
    n, descriptor = case.num_sites, DEFAULT_DESCRIPTOR
    ids = np.array([site.site_id for site in sites], np.uint64)
    rng = np.random.default_rng(rank)
    ints = np.zeros((n, NUM_INTS), np.int64)
    if rank == 0:
        ints[:, [TOTAL, FINITE]] = 1024
    ones = np.ones(n, np.int32)
    hist_ids = ids if case.has_histograms else ids[:0]
    counts = rng.integers(0, 3, (len(hist_ids), descriptor.num_counts))
    digests = np.ones((n, len(DIGEST_FIELDS)))
    return Packet(
        run_id="bench",
        segment=0,
        step=0,
        world_size=case.world_size,
        ranks=(rank,),
        descriptor=descriptor,
        sites=ids,
        ints=ints,
        floats=rng.random((n, NUM_FLOATS)),
        presence=np.full(n, Presence.OBSERVED, np.uint8),
        reason=np.full(n, -1, np.int32),
        num_scheduled=ones,
        num_observed=ones,
        num_contributing=ones,
        absmax_rank=np.full(n, rank, np.int32),
        num_nonfinite_ranks=np.zeros(n, np.int32),
        first_nonfinite_rank=np.full(n, -1, np.int32),
        hist_sites=hist_ids,
        hist_counts=counts,
        replicas=ReplicaTable.of_rank(rank, ids, np.zeros(n, np.int64), np.arange(n), digests),
    )


class Ways:
    """The three ways on one rank."""

    def __init__(self, rank: int, case: Case) -> None:
        sites = make_sites(case.num_sites)
        self._packet = make_packet(rank, case, sites)
        self._aggregator = CollectiveAggregator(NullRecorder, fan_in=FAN_IN)
        self._aggregator.attach(
            AttachOffer(rank, case.world_size, "bench", {}, DEFAULT_DESCRIPTOR, sites, deadlines=DEADLINES)
        )
        self._num_steps = 0
        self.submit_s: list[float] = []
        num_counts = DEFAULT_DESCRIPTOR.num_counts if case.has_histograms else 0
        n = case.num_sites
        self._packed = (
            (torch.zeros(n * (NUM_INTS + num_counts), dtype=torch.int64), dist.ReduceOp.SUM),
            (torch.zeros(n * 6, dtype=torch.float64), dist.ReduceOp.SUM),
            (torch.zeros(n * 4, dtype=torch.float64), dist.ReduceOp.MAX),
        )
        self._rows: list[Tensor] = list(torch.zeros(n, NUM_INTS + NUM_FLOATS + num_counts, dtype=torch.float64))

    def merge(self) -> None:
        self._num_steps += 1
        packet = replace(self._packet, step=self._num_steps)
        begun = time.perf_counter()
        self._aggregator.submit(packet)
        self.submit_s.append(time.perf_counter() - begun)
        coordinator = self._aggregator._coordinator
        assert coordinator is not None
        while coordinator.num_settled < self._num_steps and self._aggregator.failure is None:
            time.sleep(1e-4)

    def packed(self) -> None:
        for buffer, operation in self._packed:
            dist.all_reduce(buffer, operation)

    def each(self) -> None:
        for row in self._rows[:MAX_EACH]:
            dist.all_reduce(row)

    def close(self) -> None:
        failure = self._aggregator.close().failure
        assert failure is None, failure


def run_rank(pipe: Connection, rank: int, case: Case, store_path: str) -> None:
    """Measure one case on one rank; rank zero sends (seconds of each way, seconds of submit)."""
    torch.set_num_threads(1)
    store = dist.FileStore(store_path, case.world_size)
    timeout = timedelta(seconds=CASE_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.world_size, timeout=timeout)
    ways = Ways(rank, case)
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(1 + case.num_rounds):
        for way in (*WAYS[turn % 3 :], *WAYS[: turn % 3]):
            dist.barrier()
            begun = time.perf_counter()
            getattr(ways, way)()
            dist.barrier()
            taken[way].append(time.perf_counter() - begun)
    ways.close()
    pipe.send(({way: seconds[1:] for way, seconds in taken.items()}, ways.submit_s[1:]))
    dist.destroy_process_group()


def measure(case: Case) -> dict[str, float]:
    """Return medians: milliseconds of each way, microseconds of submit (the slowest rank's median)."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(case.world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=run_rank, args=(theirs, rank, case, f"{folder}/store"), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            told = [_receive(pipe) for pipe in pipes]
        finally:
            for process in processes:
                process.join(10)
                if process.is_alive():
                    process.kill()
    found = {way: 1e3 * statistics.median(told[0][0][way]) for way in WAYS}
    found["each"] *= max(1.0, case.num_sites / MAX_EACH)
    return {**found, "submit": 1e6 * max(statistics.median(submit_s) for _, submit_s in told)}


def _receive(pipe: Connection) -> Any:
    if not wait([pipe], CASE_S):
        raise TimeoutError(f"a case took longer than {CASE_S:g} s")
    return pipe.recv()


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Return the lines of the table; large ones get fewer rounds."""
    for has_histograms in (False, True):
        for num_sites in args.sites:
            for world_size in args.worlds:
                weight = num_sites * world_size * (8 if has_histograms else 1)
                rounds = args.rounds if weight < 5_000 else max(3, args.rounds // (2 if weight < 40_000 else 5))
                yield Case(world_size, num_sites, has_histograms, rounds)


def fit(points: list[tuple[float, float]], measured: list[float]) -> tuple[float, float]:
    """Return (seconds a level, seconds a byte received) that fit best in the relative sense, neither below zero."""
    weights = 1 / np.array(measured)
    matrix = np.array(points) * weights[:, None]
    solution, *_ = np.linalg.lstsq(matrix, np.ones(len(measured)), rcond=None)
    if (solution < 0).any():
        kept = int(np.argmax(solution))
        column = matrix[:, kept]
        solution = np.zeros(2)
        solution[kept] = column.sum() / (column @ column)
    return float(solution[0]), float(solution[1])


def peak_of(work: Callable[[], object]) -> int:
    """Return the most bytes that ``work`` held at a time."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def print_model(results: list[tuple[Case, dict[str, float]]]) -> None:
    """Fit the cost model to the measurements and follow it to 10,000 ranks."""
    points, measured = [], []
    for case, found in results:
        size = len(make_packet(0, case, make_sites(case.num_sites)).to_bytes())
        points.append((1.0, float((case.world_size - 1) * size)))
        measured.append(found["merge"] / 1e3)
    level_s, byte_s = fit(points, measured)
    errors = [abs(level_s * a + byte_s * b - t) / t for (a, b), t in zip(points, measured, strict=True)]
    print(f"\nmodel: {1e3 * level_s:.2f} ms a level + {1e9 * byte_s:.2f} ns a byte that a rank receives", end="; ")
    print(f"median error {statistics.median(errors):.0%}, largest {max(errors):.0%}")
    print(f"\n| sites | histograms | ranks | levels | ms a logged step | root holds, MB | packet, MB |\n{'|---' * 7}|")
    for num_sites, has_histograms in ((500, False), (500, True), (5000, False), (5000, True)):
        case = Case(FAN_IN + 1, num_sites, has_histograms, 1)
        sites = make_sites(num_sites)
        parts = [make_packet(rank, case, sites).to_bytes() for rank in range(FAN_IN + 1)]
        held = sum(map(len, parts)) + peak_of(lambda parts=parts: merge_packets([Packet.from_bytes(p) for p in parts]))
        for world_size in (16, 256, 1024, 10_000):
            root, *_ = plan_tree([str(rank // 8) for rank in range(world_size)], FAN_IN)
            predicted = root.height * (level_s + byte_s * FAN_IN * len(parts[0]))
            print(
                f"| {num_sites:,} | {'yes' if has_histograms else 'no'} | {world_size:,} | {root.height} "
                f"| {1e3 * predicted:,.0f} | {held / 1e6:,.1f} | {len(parts[0]) / 1e6:,.2f} |"
            )


def main() -> None:
    """Measure and print the tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--sites", type=int, nargs="+", default=[50, 500, 5000])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(describe_machine())
    print("\n| sites | histograms | ranks | merge, ms | packed, ms | each, ms | submit, µs |")
    print("|---" * 7 + "|")
    results = []
    for case in cases(args):
        found = measure(case)
        results.append((case, found))
        print(
            f"| {case.num_sites:,} | {'yes' if case.has_histograms else 'no'} | {case.world_size} "
            f"| {found['merge']:.1f} | {found['packed']:.1f} | {found['each']:.1f} | {found['submit']:.0f} |",
            flush=True,
        )
    slowest = max(found["submit"] for case, found in results if case.num_sites <= 500)
    verdict = "met" if slowest < TARGET_SUBMIT_US else "missed"
    print(f"\nsubmit at up to 500 sites: at most {slowest:.0f} µs, target {TARGET_SUBMIT_US:.0f} µs {verdict}")
    print_model(results)


if __name__ == "__main__":
    main()
