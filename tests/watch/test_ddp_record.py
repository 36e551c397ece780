"""The merged record of data-parallel ranks is that of one process on the same global batch; training is untouched."""

from __future__ import annotations

import math

import numpy as np
import pytest

from aggregator import open_history
from telemetry.summary import FLOAT_FIELDS, INT_FIELDS
from tests.ranks import run_ranks
from tests.watch.jobs import STEPS, Net, train, train_and_read

# Ranks that hold other elements of a site each make a call; replicas are counted once.
INTS = tuple(name for name in INT_FIELDS if name != "calls")
POWERS = {"min": 1, "max": 1, "absmax": 1, "sum": 1, "sum_sq": 2, "sum_abs": 1, "mean": 1, "m2": 2, "m3": 3, "m4": 4}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return run_ranks(train_and_read, 1, tmp_path_factory.mktemp("one") / "run")[0]["record"]


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_integer_and_bin_is_equal_and_every_float_to_a_millionth(world_size, reference, tmp_path):
    found = run_ranks(train_and_read, world_size, tmp_path / "run")[0]["record"]
    assert found.keys() == reference.keys()
    assert len(found) == STEPS * (2 * 8 + 3 * 7)
    for key, expected in reference.items():
        _, kind, _ = key
        row = found[key]
        assert [row[name] for name in INTS] == [expected[name] for name in INTS], key
        # Each rank's loss is the mean over its own samples, so what flows back is larger by the number of ranks.
        scale = world_size if kind == "activation_grad" else 1
        for name in FLOAT_FIELDS:
            wanted = expected[name] * scale ** POWERS[name]
            assert math.isclose(row[name], wanted, rel_tol=1e-6, abs_tol=1e-12), (key, name)
        if scale == 1:
            assert row["bins"] == expected["bins"], key
        else:
            # A factor of two moves a count by exactly one octave of four bins.
            assert sorted(row["bins"].values()) == sorted(expected["bins"].values()), key


def test_replicated_parameters_and_gradients_count_once(reference, tmp_path):
    found = run_ranks(train_and_read, 2, tmp_path / "run")[0]["record"]
    for kind in ("parameter", "gradient", "update"):
        assert found[1, kind, "embed.weight"]["total"] == 16 * 6


def both(rank: int, world_size: int, to) -> list[dict]:
    return [train(rank, world_size, None, random=True), train(rank, world_size, to, random=True)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_observed_training_is_the_unobserved_one_bit_for_bit(world_size, tmp_path):
    for plain, observed in run_ranks(both, world_size, tmp_path / "run"):
        assert plain["losses"] == observed["losses"]
        assert plain["state"].keys() == observed["state"].keys()
        assert all(np.array_equal(plain["state"][name], observed["state"][name]) for name in plain["state"])
        assert plain["rng"] == observed["rng"]
        assert observed["report"].num_logged == STEPS


def test_every_rank_gets_the_account_and_only_rank_zero_writes(tmp_path):
    to = tmp_path / "run"
    reports = [result["report"] for result in run_ranks(train_and_read, 2, to, True)]
    assert [report.merge.num_committed for report in reports] == [STEPS, STEPS]
    assert all(report.merge.failure is None and not report.merge.missing_ranks for report in reports)
    assert sorted(path.name for path in to.iterdir()) == ["manifest.json", "record.jsonl", "seg-00000"]
    assert "sink jsonl: ok" in str(reports[0])
    coverage = open_history(to).coverage().to_pylist()
    assert [(row["num_ranks"], row["world_size"]) for row in coverage] == [(2, 2)] * STEPS


def test_what_observing_costs_is_a_series_of_every_step(tmp_path):
    run_ranks(train_and_read, 2, tmp_path / "run")
    steps = open_history(tmp_path / "run").steps().to_pylist()
    assert len(steps) == STEPS
    for step in steps:
        assert 0.0 < step["transfer_s"] < step["self_s"] < step["step_s"]
        assert step["merge_s"] > 0.0
        # Two copies of everything that lies on both ranks, and the update is read in float64, as the model is.
        assert step["read_bytes"] > 2 * 3 * 8 * (16 * 6 + 6 * 12)
        assert step["num_budget_dropped"] == 0
    counting, plain = steps[1]["transfer_bytes"], steps[2]["transfer_bytes"]
    assert 0 < plain < counting


def test_sites_stand_in_the_order_of_the_model(tmp_path):
    run_ranks(train_and_read, 2, tmp_path / "run")
    sites = open_history(tmp_path / "run").sites().to_pylist()
    names = {
        kind: [row["site"] for row in sites if row["kind"] == kind] for kind in ("parameter", "gradient", "activation")
    }
    weights = [name for name, _ in Net(random=False).named_parameters()]
    assert names["parameter"] == names["gradient"] == weights
    assert names["activation"] == ["embed", "norm", "body.0", "body.1", "body.2", "body.3", "body", "head"]
