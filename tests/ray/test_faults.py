"""Real faults in a real cluster: whatever is killed, stalled or repeated, the record says what is true."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from aggregator import open_history
from aggregator.ray_actor import aggregator as aggregator_module
from aggregator.ray_actor.messages import State
from telemetry.errors import MergeDeadlineError, PeerLostError, WriterFencedError
from telemetry.protocol import Deadlines
from tests.ray.clusters import IMPATIENT, PATIENT, Rank, in_parallel, root_of, status_of, wait_until, world

pytestmark = pytest.mark.timeout(240)

RankProcess = ray.remote(num_cpus=0, max_concurrency=2)(Rank)


def attached(ranks, deadlines=PATIENT):
    replies = in_parallel([lambda rank=rank: rank.attach(deadlines) for rank in ranks])
    assert len({(reply.run_id, reply.segment) for reply in replies}) == 1
    return ranks


def processes(world_size, name, path, deadlines, nodes=None, first=0, **options):
    """Return attached ranks that are processes of their own; rank ``first`` is the first to come."""
    made = []
    for rank in range(world_size):
        place = (
            {} if nodes is None else {"scheduling_strategy": NodeAffinitySchedulingStrategy(nodes[rank], soft=False)}
        )
        made.append(RankProcess.options(**place).remote(rank, world_size, name, str(path), "attempt", **options))
    ray.get([made[first].pid.remote()], timeout=60)
    calls = [made[first].attach.remote(deadlines)]
    wait_until(lambda: _exists(name))
    calls += [rank.attach.remote(deadlines) for i, rank in enumerate(made) if i != first]
    ray.get(calls, timeout=90)
    return made


def _exists(name):
    with contextlib.suppress(ValueError):
        return root_of(name) is not None
    return False


def coverage(path):
    return [(row["step"], row["num_ranks"], row["missing_ranks"]) for row in open_history(path).coverage().to_pylist()]


def totals(path, site="a"):
    table = open_history(path).observations(columns=["step", "site", "total"]).to_pylist()
    return {row["step"]: row["total"] for row in table if row["site"] == site}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_kills", [3, pytest.param(20, marks=pytest.mark.full)])
def test_an_actor_killed_at_random_moments_loses_no_acknowledged_packet_and_counts_none_twice(
    cluster, name, tmp_path, num_kills
):
    rng = random.Random(num_kills)
    ranks = attached(world(2, name, tmp_path / "run"))
    is_over = threading.Event()
    submitted = [0, 0]

    def produce(rank):
        step = 0
        while not is_over.is_set():
            if rank.num_waiting() < 100:
                step += 1
                rank.submit(step)
                submitted[rank.rank] = step
            time.sleep(0.01)
        return step

    def kill():
        try:
            for _ in range(num_kills):
                time.sleep(rng.uniform(0.0, 1.0))
                before = status_of(name)
                os.kill(before.pid, signal.SIGKILL)
                wait_until(lambda before=before: _pid(name) not in (None, before.pid), 60)
        finally:
            is_over.set()

    *produced, killed = in_parallel([*(lambda rank=rank: produce(rank) for rank in ranks), kill], 500)
    assert killed is None
    # Ranks stop at different steps; what one has brought alone still belongs to the record.
    last = max(produced)
    for rank in ranks:
        for step in range(submitted[rank.rank] + 1, last + 1):
            rank.submit(step)
    reports = in_parallel([rank.close for rank in ranks])
    assert [report.failure for report in reports] == [None, None]
    assert [report.num_committed for report in reports] == [last, last]
    assert coverage(tmp_path / "run") == [(step, 2, []) for step in range(1, last + 1)]
    # Two elements of each rank: a packet that was counted twice would make six.
    assert set(totals(tmp_path / "run").values()) == {4}
    restarts = [f for f in reports[0].findings if f["code"] == "aggregator_restarted"]
    assert sum(f["count"] for f in restarts) == open_history(tmp_path / "run").segments().num_rows - 1
    assert 1 <= sum(f["count"] for f in restarts) <= num_kills


def _pid(name):
    with contextlib.suppress(Exception):
        return status_of(name).pid
    return None


def test_a_rank_killed_in_the_middle_of_a_step_is_named_and_the_others_go_on(cluster, name, tmp_path):
    deadlines = replace(IMPATIENT, close_s=20)
    ranks = processes(3, name, tmp_path / "run", deadlines)
    ray.get([rank.submit.remote(1) for rank in ranks])
    ray.get([rank.wait_until_settled.remote() for rank in ranks])
    with contextlib.suppress(ProcessLookupError):
        os.kill(ray.get(ranks[1].pid.remote()), signal.SIGKILL)
    left = [ranks[0], ranks[2]]
    begun = time.monotonic()
    for step in (2, 3, 4):
        ray.get([rank.submit.remote(step) for rank in left])
    ray.get([rank.wait_until_settled.remote() for rank in left])
    # One deadline in all: the steps after the first do not wait for a rank that has missed it.
    assert time.monotonic() - begun < 2.5 * deadlines.merge_s + 5
    assert ray.get([rank.failure.remote() for rank in left]) == [None, None]
    assert status_of(name).silent_ranks == [1]
    reports = ray.get([rank.close.remote() for rank in left])
    for report in reports:
        assert (report.num_committed, report.num_partial, report.missing_ranks) == (4, 3, (1,))
        assert type(report.failure) is MergeDeadlineError
        assert set(report.failure.failures) == {1}
    assert coverage(tmp_path / "run") == [(1, 3, []), (2, 2, [1]), (3, 2, [1]), (4, 2, [1])]
    reasons = open_history(tmp_path / "run").coverage()["missing_reasons"].to_pylist()
    assert reasons[1][0].startswith("brought nothing within 1.5")


def test_a_node_that_goes_takes_its_ranks_and_the_root_with_it_and_the_record_goes_on(cluster, name, tmp_path):
    second = cluster.add_node(num_cpus=2, object_store_memory=80_000_000)
    here, there = ray.get_runtime_context().get_node_id(), second.node_id
    nodes = [here, here, there]
    deadlines = Deadlines(attach_s=60, merge_s=8, close_s=40)
    # The root is created on the node of the rank that comes first, where Ray finds room there.
    for attempt in range(4):
        run, path = f"{name}-{attempt}", tmp_path / f"run{attempt}"
        ranks = processes(3, run, path, deadlines, nodes, first=2)
        before = status_of(run)
        if _is_on(second, before.pid):
            break
        ray.get([rank.close.remote() for rank in ranks], timeout=60)
    else:
        raise AssertionError("Ray has put the root on the other node each time")
    assert before.num_relays == 2
    ray.get([rank.submit.remote(1) for rank in ranks])
    ray.get([rank.wait_until_settled.remote() for rank in ranks], timeout=60)
    cluster.remove_node(second, allow_graceful=False)
    left = ranks[:2]
    for step in (2, 3):
        ray.get([rank.submit.remote(step) for rank in left])
    ray.get([rank.wait_until_settled.remote(90) for rank in left], timeout=100)
    after = status_of(run)
    assert after.pid != before.pid
    assert after.silent_ranks == [2]
    reports = ray.get([rank.close.remote() for rank in left], timeout=60)
    for report in reports:
        assert (report.num_committed, report.num_partial, report.missing_ranks) == (3, 2, (2,))
    assert coverage(path) == [(1, 3, []), (2, 2, [2]), (3, 2, [2])]
    assert totals(path) == {1: 6, 2: 4, 3: 4}


def _is_on(node, pid):
    """Tell whether the raylet of a node has started the process."""
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return parent == node.all_processes["raylet"][0].process.pid


def test_repeated_late_and_reordered_packets_count_once_or_are_counted_as_late(cluster, name, tmp_path):
    ranks = attached(world(2, name, tmp_path / "run"), IMPATIENT)
    root = root_of(name)

    def deliver(rank, step, previous=None):
        before = None if previous is None else (0, previous)
        return root.deliver.remote(ranks[rank].packet(step).to_bytes(), before)

    # Step 8 overtakes step 7, and step 7 of rank 0 comes three times.
    calls = [deliver(0, 8, 7), deliver(1, 8, 7), deliver(0, 7), deliver(0, 7), deliver(1, 7), deliver(0, 7)]
    assert [receipt.state for receipt in ray.get(calls, timeout=30)] == [State.DURABLE] * 6
    assert ray.get(deliver(0, 7), timeout=30).state is State.DURABLE
    # Rank 1 brings step 9 after the deadline.
    assert ray.get(deliver(0, 9, 8), timeout=30).state is State.DURABLE
    assert ray.get(deliver(1, 9, 8), timeout=30).state is State.LATE
    assert [r.state for r in ray.get([deliver(0, 10, 9), deliver(1, 10, 9)], timeout=30)] == [State.DURABLE] * 2
    status = status_of(name)
    assert (status.num_repeated, status.num_late) == (3, 1)
    reports = in_parallel([rank.close for rank in ranks])
    assert coverage(tmp_path / "run") == [(7, 2, []), (8, 2, []), (9, 1, [1]), (10, 2, [])]
    assert totals(tmp_path / "run") == {7: 4, 8: 4, 9: 2, 10: 4}
    (late,) = [finding for finding in reports[0].findings if finding["code"] == "late_packet"]
    assert (late["ranks"], late["late_step"], late["step"]) == ([1], 9, 10)


def test_a_stalled_actor_costs_producers_nothing_but_what_they_cannot_keep(cluster, name, tmp_path, monkeypatch):
    monkeypatch.setattr(aggregator_module, "_MAX_ABSTAINED", 50)
    ranks = attached(world(8, name, tmp_path / "run", max_in_flight=100))
    packets = {rank.rank: rank.packet(1) for rank in ranks}

    def produce(rank, steps):
        times = []
        for step in steps:
            begun = time.perf_counter()
            rank.aggregator.submit(replace(packets[rank.rank], step=step))
            times.append(time.perf_counter() - begun)
            time.sleep(0.002)
        return times

    def produce_all(steps):
        return [t for times in in_parallel([lambda r=r: produce(r, steps) for r in ranks]) for t in times]

    flowing = produce_all(range(1, 11))
    for rank in ranks:
        rank.wait_until_settled()
    pid = status_of(name).pid
    os.kill(pid, signal.SIGSTOP)
    try:
        stalled = produce_all(range(11, 111))
        for rank in ranks:
            delivery = rank.aggregator._delivery
            # The share of a rank is 12 packets of 100; behind them wait 50 without observations.
            assert rank.num_waiting() == 62
            sizes = sorted(outgoing.size_bytes for outgoing in delivery._unanswered.values())
            assert sum(size > 2048 for size in sizes) <= 12
            assert rank.failure() is None
    finally:
        os.kill(pid, signal.SIGCONT)
    assert median(stalled) < max(2 * median(flowing), 200e-6)
    reports = in_parallel([rank.close for rank in ranks])
    assert {report.failure for report in reports} == {None}
    assert {report.num_abstained for report in reports} == {8 * 88}
    assert {report.num_committed for report in reports} == {10 + 62}
    counted = Counter(open_history(tmp_path / "run").coverage()["num_ranks"].to_pylist())
    assert counted == {8: 10 + 12, 0: 50}


def test_a_packet_of_five_mebibytes_arrives(cluster, name, tmp_path):
    ranks = attached(world(2, name, tmp_path / "run"))
    values = {f"site.{i}": [float(i)] for i in range(1400)}
    for rank in ranks:
        packet = replace(rank.packet(1), **_rows(rank, values))
        assert len(packet.to_bytes()) > 5 << 20
        rank.aggregator.submit(packet)
    assert {report.num_committed for report in in_parallel([rank.close for rank in ranks])} == {1}
    rows = open_history(tmp_path / "run").observations(columns=["site", "total", "max"]).to_pylist()
    assert {row["site"]: (row["total"], row["max"]) for row in rows} == {f"site.{i}": (2, i) for i in range(1400)}


def _rows(rank, values):
    from tests.packets import make_packet

    made = make_packet(rank.rank, 2, 1, values, histograms=True)
    names = {"run_id", "segment"}
    return {name: value for name, value in vars(made).items() if name not in names}


def test_an_attempt_that_is_overtaken_stops_and_its_successor_is_untouched(cluster, name, tmp_path):
    (earlier,) = attached(world(1, name, tmp_path / "run", "earlier"))
    earlier.submit(1)
    earlier.wait_until_settled()
    (later,) = world(1, name, tmp_path / "run", "later")
    assert later.attach(resume_step=2).segment == 1
    later.submit(2)
    later.wait_until_settled()
    earlier.submit(2)
    wait_until(lambda: earlier.failure() is not None)
    assert type(earlier.failure()) is WriterFencedError
    assert type(earlier.close().failure) is WriterFencedError
    later.submit(3)
    assert later.close().failure is None
    assert coverage(tmp_path / "run") == [(1, 1, []), (2, 1, []), (3, 1, [])]


def test_an_actor_that_is_ended_for_good_is_a_failure_and_not_an_exception(cluster, name, tmp_path):
    (rank,) = attached(world(1, name, tmp_path / "run"))
    rank.submit(1)
    rank.wait_until_settled()
    ray.kill(root_of(name), no_restart=True)
    rank.submit(2)
    wait_until(lambda: rank.failure() is not None)
    assert type(rank.failure()) is PeerLostError
    report = rank.close()
    assert (report.num_committed, type(report.failure)) == (1, PeerLostError)
    assert coverage(tmp_path / "run") == [(1, 1, [])]
