"""Steps of real ranks merge into one, exactly, whatever the shape of the tree."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch.distributed as dist

from aggregator.merge import merge_packets
from telemetry.packet import StepFacts
from telemetry.protocol import load_aggregator
from telemetry.summary import derive
from telemetry.summary.fields import ABSMAX, FINITE, MEAN, TOTAL
from tests.collective.worlds import attach
from tests.packets import make_packet, make_site
from tests.ranks import run_ranks

ROW_COLUMNS = [
    *("ints", "floats", "presence", "reason", "num_scheduled", "num_observed", "num_contributing"),
    *("absmax_rank", "num_nonfinite_ranks", "first_nonfinite_rank", "hist_counts"),
]


def _values(rank, step):
    rng = np.random.default_rng((rank, step))
    return {"shared": rng.normal(rank, 2.0, 50 + rank), f"only.{rank % 3}": rng.normal(size=7)}


def _log_three_steps(rank, world_size, fan_in, stagger):
    aggregator, recorder = attach(rank, world_size, fan_in=fan_in)
    for step in (3, 10, 11):
        if stagger:
            # Another rank is the last at every step.
            time.sleep(0.02 * ((rank + step) % world_size))
        aggregator.submit(make_packet(rank, world_size, step, _values(rank, step), histograms=True))
    report = aggregator.close()
    return report, [step.packet.to_bytes() for step in recorder.steps], [step.step for step in recorder.steps]


@pytest.mark.parametrize(("world_size", "fan_in"), [(1, 16), (2, 16), (4, 2), (8, 2), (8, 16)])
def test_the_merged_step_is_what_one_fold_over_all_ranks_gives(world_size, fan_in):
    results = run_ranks(_fold_and_compare, world_size, fan_in)
    assert all(results)


def _fold_and_compare(rank, world_size, fan_in):
    aggregator, recorder = attach(rank, world_size, fan_in=fan_in)
    aggregator.submit(make_packet(rank, world_size, 7, _values(rank, 7), histograms=True))
    report = aggregator.close()
    if rank == 0:
        whole = merge_packets(
            [make_packet(r, world_size, 7, _values(r, 7), histograms=True) for r in range(world_size)]
        )
        (step,) = recorder.steps
        assert step.packet.ranks == tuple(range(world_size))
        assert not step.is_partial
        for column in ("sites", "ints", "presence", "num_observed", "absmax_rank", "hist_sites", "hist_counts"):
            np.testing.assert_array_equal(getattr(step.packet, column), getattr(whole, column))
        np.testing.assert_allclose(step.packet.floats, whole.floats, rtol=1e-12, atol=1e-12)
        assert {site.name for site in step.sites} == {"shared", *(f"only.{r % 3}" for r in range(world_size))}
    assert report.failure is None
    return report.num_committed == 1


def test_the_same_packets_give_the_same_bits_whoever_is_late():
    prompt = run_ranks(_log_three_steps, 4, 2, False)
    staggered = run_ranks(_log_three_steps, 4, 2, True)
    assert prompt[0][1] == staggered[0][1]
    assert prompt[0][2] == [3, 10, 11]


def test_every_rank_gets_the_same_report_and_only_rank_zero_records():
    results = run_ranks(_log_three_steps, 4, 2, False)
    reports = [report for report, _, _ in results]
    assert all(report == reports[0] for report in reports)
    assert (reports[0].num_committed, reports[0].last_committed_step, reports[0].num_partial) == (3, 11, 0)
    assert [sink.num_emitted for sink in reports[0].sinks] == [3]
    assert [len(steps) for _, steps, _ in results] == [3, 0, 0, 0]


def _rank_two_observes_nothing(rank, world_size):
    aggregator, recorder = attach(rank, world_size)
    values = {} if rank == 2 else {"loss": [float(rank)]}
    aggregator.submit(make_packet(rank, world_size, 1, values))
    aggregator.close()
    return [(s.packet.ranks, s.packet.num_contributing.tolist(), s.packet.ints[0, TOTAL]) for s in recorder.steps]


def test_a_rank_that_observes_nothing_still_enters_and_is_not_counted():
    assert run_ranks(_rank_two_observes_nothing, 4)[0] == [((0, 1, 2, 3), [3], 3)]


def _uneven_updates(rank, world_size):
    aggregator, recorder = attach(rank, world_size)
    updates = (3, 0, 1)[rank]
    facts = StepFacts(num_optimizer_steps=updates, num_applied=int(updates > 0), num_skipped=int(updates == 0))
    aggregator.submit(make_packet(rank, world_size, 1, {"update": [float(rank + 1)] * updates}, facts=facts))
    aggregator.close()
    return [(s.packet.ints[0], s.packet.floats[0], s.packet.facts) for s in recorder.steps]


def test_uneven_counts_of_updates_add_up_without_padding():
    ((ints, floats, facts),) = run_ranks(_uneven_updates, 3)[0]
    assert ints[TOTAL] == 4
    assert derive("mean", ints, floats) == (3 * 1.0 + 1 * 3.0) / 4
    assert (facts.num_applied, facts.num_skipped, facts.num_optimizer_steps) == (2, 1, 3)


def _only_the_last_rank_has_the_site(rank, world_size):
    aggregator, recorder = attach(rank, world_size)
    values = {"peak": [-7.0, np.inf]} if rank == world_size - 1 else {}
    aggregator.submit(make_packet(rank, world_size, 1, values))
    aggregator.close()
    return [
        (s.sites, s.packet.floats[0, ABSMAX], s.packet.absmax_rank[0], s.packet.first_nonfinite_rank[0])
        for s in recorder.steps
    ]


def test_a_value_of_one_rank_is_in_the_record_with_that_rank():
    assert run_ranks(_only_the_last_rank_has_the_site, 4)[0] == [((make_site("peak"),), 7.0, 3, 3)]


def _sites_known_from_the_offer(rank, world_size):
    own = make_site(f"layer.{rank}")
    aggregator, recorder = attach(rank, world_size, sites=(own,))
    for step in (1, 2):
        aggregator.submit(make_packet(rank, world_size, step, {own.name: [1.0]}, define=False))
    aggregator.close()
    if rank != 0:
        return None
    assert {site.name for site in recorder.offer.sites} == {"layer.0", "layer.1"}
    return [{site.name for site in step.new_sites} for step in recorder.steps]


def test_sites_offered_at_attach_are_new_in_the_first_step_that_has_them():
    assert run_ranks(_sites_known_from_the_offer, 2)[0] == [{"layer.0", "layer.1"}, set()]


def _conflict_during_the_run(rank, world_size):
    """Rank 2 offers a site at attach; rank 3 meets it in the second step and defines it otherwise."""
    offered = (make_site("late"),) if rank == 2 else ()
    aggregator, recorder = attach(rank, world_size, sites=offered)
    for step in (1, 2, 3):
        names = [f"own.{rank}", "shared"] if rank % 2 else ["shared", f"own.{rank}"]
        values = {name: [1.0] for name in names} | ({"late": [1.0]} if rank in (2, 3) and step > rank - 2 else {})
        packet = make_packet(rank, world_size, step, {} if rank == 1 else values)
        if rank == 3:
            changed = (replace(site, dtype="int8") if site.name == "late" else site for site in packet.definitions)
            packet = replace(packet, definitions=tuple(changed))
        aggregator.submit(packet)
    report = aggregator.close()
    told = [[dict(f) for f in s.packet.findings] for s in recorder.steps]
    totals = [{site.name: int(s.packet.ints[i, TOTAL]) for i, site in enumerate(s.sites)} for s in recorder.steps]
    return report, told, totals, [s.packet.ranks for s in recorder.steps]


def test_a_conflict_that_appears_during_the_run_names_the_ranks_and_costs_that_site_alone():
    report, told, totals, ranks = run_ranks(_conflict_during_the_run, 4)[0]
    assert report.failure is None
    assert ranks == [(0, 1, 2, 3)] * 3
    found = [(f["step"], f["site"], f["ranks"], f["other_ranks"]) for step in told for f in step]
    assert found[0] == (2, "late", [3], [2])
    own = {"own.0": 1, "own.2": 1, "own.3": 1, "shared": 3}
    assert totals == [{**own, "late": 1}, {**own, "late": 0}, {**own, "late": 0}]


def _five_mebibytes(rank, world_size):
    aggregator, recorder = attach(rank, world_size)
    small = make_packet(rank, world_size, 1, {"one": [1.0, 2.0, 4.0]}, histograms=True)
    sites = sorted((make_site(f"site.{i}") for i in range(1300)), key=lambda site: site.site_id)
    ids = np.array([site.site_id for site in sites], np.uint64)
    rows = {name: np.repeat(getattr(small, name), len(sites), axis=0) for name in ROW_COLUMNS}
    packet = replace(small, definitions=tuple(sites), **rows, sites=ids, hist_sites=ids)
    assert len(packet.to_bytes()) > 5 << 20
    aggregator.submit(packet)
    assert aggregator.close().failure is None
    return [(s.packet.num_rows, int(s.packet.hist_counts.sum())) for s in recorder.steps]


def test_a_packet_of_five_mebibytes_arrives():
    assert run_ranks(_five_mebibytes, 4)[0] == [(1300, 4 * 3 * 1300)]


def _leave_the_default_group_alone(rank, world_size):
    groups_before = dict(dist.distributed_c10d._world.pg_names)
    aggregator, _ = attach(rank, world_size)
    assert dict(dist.distributed_c10d._world.pg_names) == groups_before
    value = np.int64(rank)
    gathered = [None] * world_size
    aggregator.submit(make_packet(rank, world_size, 1, {"a": [1.0]}))
    dist.all_gather_object(gathered, value)
    aggregator.close()
    dist.barrier()
    return [int(v) for v in gathered]


def test_the_groups_of_the_training_are_not_touched():
    assert run_ranks(_leave_the_default_group_alone, 2) == [[0, 1], [0, 1]]


def test_a_world_of_one_needs_no_process_group():
    aggregator, recorder = attach(0, 1)
    aggregator.submit(make_packet(0, 1, 5, {"a": [1.0, 3.0]}))
    report = aggregator.close()
    assert (report.num_committed, report.last_committed_step) == (1, 5)
    assert recorder.steps[0].packet.floats[0, MEAN] == 2.0
    assert recorder.steps[0].packet.ints[0, FINITE] == 2
    assert recorder.is_closed


def test_a_directory_is_served_by_the_collective_aggregator():
    assert type(load_aggregator("runs/exp1")).__name__ == "CollectiveAggregator"
