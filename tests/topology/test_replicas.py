"""Replicas are checked, not trusted: a rank that holds other bits than its peers is named."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import telemetry
from aggregator.checks import check_step, drift
from telemetry.fingerprint import combine_, fingerprint
from telemetry.replicas import ReplicaTable
from telemetry.summary import available_backends, using_backend
from tests.aggregators import GatheringAggregator
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_one_flipped_bit_anywhere_changes_the_fingerprint(dtype):
    torch.manual_seed(0)
    tensor = torch.randn(70_000).to(dtype) if dtype.is_floating_point else torch.randint(0, 2, (70_000,)).to(dtype)
    original = tensor.clone()
    before = int(fingerprint(tensor))
    assert torch.equal(tensor, original)
    raw = tensor.view(torch.uint8)
    for position in (0, 1, len(raw) // 2, len(raw) - 1):
        raw[position] ^= 1
        assert int(fingerprint(tensor)) != before
        raw[position] ^= 1
    assert int(fingerprint(tensor)) == before


@given(st.lists(st.floats(width=32), min_size=2, max_size=200), st.data())
def test_exchanging_two_different_elements_changes_the_fingerprint(values, data):
    i, j = (data.draw(st.integers(0, len(values) - 1)) for _ in range(2))
    tensor = torch.tensor(values)
    swapped = tensor.clone()
    swapped[i], swapped[j] = tensor[j], tensor[i]
    same_bits = torch.equal(tensor.view(torch.int32), swapped.view(torch.int32))
    assert (int(fingerprint(tensor)) == int(fingerprint(swapped))) == same_bits


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float8_e5m2, torch.int8, torch.bool]
)
@pytest.mark.parametrize("num_elements", [0, 1, 7, 70_001])
def test_every_backend_takes_the_same_fingerprint(dtype, num_elements):
    torch.manual_seed(1)
    tensor = torch.randint(0, 256, (num_elements * dtype.itemsize,), dtype=torch.uint8)
    tensor = tensor % 2 if dtype is torch.bool else tensor
    found = set()
    for name in available_backends():
        with using_backend(name):
            found.add(int(fingerprint(tensor.view(dtype))))
    assert len(found) == 1


def test_a_view_has_the_fingerprint_of_its_elements_in_order():
    tensor = torch.randn(300, 500)
    assert int(fingerprint(tensor.t())) == int(fingerprint(tensor.t().contiguous())) != int(fingerprint(tensor))


def test_the_order_of_calls_matters():
    a, b = torch.ones(3), torch.zeros(3)

    def both(first, second):
        combined = fingerprint(first)
        combine_(combined, fingerprint(second))
        return int(combined)

    assert both(a, b) != both(b, a)


def table(rank: int, **fingerprints: int) -> ReplicaTable:
    sites = np.arange(len(fingerprints), dtype=np.uint64)
    values = np.array(list(fingerprints.values()), dtype=np.int64)
    return ReplicaTable.of_rank(rank, sites, np.zeros(len(sites), np.int64), values, np.zeros((len(sites), 4)))


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.randoms())
def test_tables_merge_to_one_entry_for_each_fingerprint_in_any_order(fingerprints, random):
    tables = [table(rank, site=value) for rank, value in enumerate(fingerprints)]
    random.shuffle(tables)
    merged = ReplicaTable.empty()
    for one in tables:
        merged = merged.merge(one)
    for row, value in enumerate(sorted(set(fingerprints))):
        ranks = [rank for rank, other in enumerate(fingerprints) if other == value]
        assert merged.fingerprints[row] == value
        assert merged.num_ranks[row] == len(ranks)
        assert [r for r in merged.ranks[row].tolist() if r >= 0] == ranks[:8]
    assert len(merged) == len(set(fingerprints))


@pytest.mark.parametrize(
    ("here", "there", "expected"),
    [([1, 5], [3, 2], (3, 2 / 3)), ([100], [101], (1, 1 / 101)), ([-1], [1], (2, 2)), ([0], [0], (0, 0))],
)
def test_drift_is_absolute_and_relative_to_the_larger(here, there, expected):
    found = drift(np.array(here, dtype=float), np.array(there, dtype=float))
    assert found == pytest.approx(expected)


def flip_one_bit(rank: int, world_size: int, fault: str) -> list[dict]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    kept = GatheringAggregator()
    options = {
        "signals": ("parameters", "updates"),
        "every": 1,
        "layout": telemetry.ParallelLayout.from_sizes({"dp": 4}),
    }
    with telemetry.watch(model, to=kept, **options) as session:
        for step in (1, 2):
            with session.step(step):
                pass
            if rank == 2:
                raw = model[1].weight.detach().view(torch.int32)[3]
                raw[4] ^= 1 if fault == "bit" else 1 << 30
    return [dict(f) for packet in kept.packets for f in check_step(packet, kept.sites().values())]


@pytest.mark.parametrize(("fault", "beyond"), [("bit", False), ("value", True)])
def test_one_bit_of_one_weight_on_one_rank_is_found_and_nothing_else(fault, beyond):
    (finding,) = run_ranks(flip_one_bit, 4, fault)[0]
    assert (finding["code"], finding["site"], finding["kind"]) == ("replica_disagreement", "1.weight", "parameter")
    assert (finding["axes"], finding["ranks"], finding["step"]) == (["dp"], [2], 2)
    assert finding["beyond_tolerance"] is beyond
    assert "rank 2 is not equal" in finding["message"]
    assert finding["relative"] is None or math.isfinite(finding["relative"])


def replicas_that_are_shards(rank: int, world_size: int) -> list[str]:
    model, kept = nn.Sequential(nn.Identity()), GatheringAggregator()
    layout = telemetry.ParallelLayout.from_sizes({"tp": 2})
    with telemetry.watch(model, to=kept, layout=layout, signals=("activations",), every=1) as session, session.step(1):
        model(torch.full((2,), float(rank)))
    return [f["code"] for f in check_step(kept.packets[0], kept.sites().values())]


def test_a_shard_that_passes_for_a_replica_is_found():
    assert run_ranks(replicas_that_are_shards, 2)[0] == ["replica_disagreement"]
