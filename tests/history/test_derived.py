"""What is computed on read: drift of a site, quantiles, coarse steps, streams and followers."""

import math

import numpy as np
import pyarrow.compute as pc
import pytest
import torch

from aggregator.history import FoldingPolicy, HistoryWriter, open_history
from aggregator.history.series import drift_between
from aggregator.testing.packets import make_packet, make_site, make_steps
from telemetry.errors import ConfigurationError, FieldUnknownError
from telemetry.packet import StepFacts
from telemetry.presence import Presence
from telemetry.replicas import ReplicaTable
from telemetry.summary import DEFAULT_DESCRIPTOR, SUMMARY_FIELDS, summarize

ATTN, GRAD = make_site("attn"), make_site("attn", "gradient")
WEIGHT = make_site("w", "parameter", numel=4, placements=(("dp", "replica"),))


def record(path, packets, resume_step=None, folding=None):
    writer = HistoryWriter.create(path, {}, DEFAULT_DESCRIPTOR, resume_step, folding=folding)
    for step in make_steps(packets):
        writer.commit(step)
        assert writer.wait_folded(50)
    writer.close()
    return open_history(path)


def ones(count=4):
    return summarize(torch.ones(count))


# Drift


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"dtype": "bfloat16"}, "dtype 'float32' against 'bfloat16'"),
        ({"numel": 8}, "numel 4 against 8"),
        ({"placements": (("dp", "shard(0)"),)}, "placements"),
        ({"shape": (2, 2)}, "shape (4,) against (2, 2)"),
    ],
)
def test_a_site_that_becomes_another_thing_ends_its_series_and_begins_a_new_one(tmp_path, changed, reason):
    became = make_site("w", "parameter", **{"numel": 4, "placements": (("dp", "replica"),), **changed})
    packets = [make_packet(step, {WEIGHT if step < 5 else became: ones()}) for step in range(9)]
    history = record(tmp_path, packets, folding=FoldingPolicy((3, 2)))
    rows = history.sites().select(["series", "first_step", "ended_step", "ended_reason"]).to_pylist()
    assert [(row["series"], row["first_step"], row["ended_step"]) for row in rows] == [(0, 0, 5), (1, 5, None)]
    assert reason in rows[0]["ended_reason"]
    assert history.series("w", "parameter", "total")["step"].to_pylist() == [5, 6, 7, 8]
    assert history.series("w", "parameter", "total", series=0)["step"].to_pylist() == [0, 1, 2, 3, 4]
    assert history.series("w", "parameter", "total").schema.metadata[b"series"] == b"1 of 2"
    assert history.observations(columns=["series"])["series"].to_pylist() == [0] * 5 + [1] * 4


def test_a_site_that_is_another_thing_in_the_next_attempt_is_another_series(tmp_path):
    record(tmp_path, [make_packet(step, {WEIGHT: ones()}) for step in range(6)])
    became = make_site("w", "parameter", numel=8, placements=(("dp", "replica"),))
    history = record(tmp_path, [make_packet(step, {became: ones(8)}) for step in range(4, 8)], resume_step=4)
    assert history.sites()["ended_step"].to_pylist() == [4, None]
    assert history.series("w", "parameter", "total")["value"].to_pylist() == [8] * 4
    superseded = history.observations(columns=["step", "segment", "series"], include_superseded=True).to_pylist()
    assert [row["series"] for row in superseded] == [0] * 6 + [1] * 4


def test_the_shape_of_a_batch_or_of_a_shard_is_no_drift():
    assert drift_between(ATTN, make_site("attn", shape=(9,))) == ""
    sharded = make_site("w", "parameter", numel=8)
    assert drift_between(sharded, make_site("w", "parameter", numel=8, shape=(2,))) == ""


# Quantiles


def test_quantiles_lie_between_their_bounds_and_the_bounds_hold_the_truth(tmp_path):
    generator = torch.Generator().manual_seed(4)
    populations = {step: torch.randn(1000, generator=generator) for step in range(3)}
    populations[3] = torch.tensor([0.0, -math.inf, math.inf, math.nan, 1e30, -1e-30])
    packets = [make_packet(n, {ATTN: summarize(values, histogram=True)}) for n, values in populations.items()]
    asked = (0.0, 0.01, 0.5, 0.99, 1.0)
    for row in record(tmp_path, packets).quantiles("attn", "activation", asked).to_pylist():
        values = populations[row["step"]].double()
        values = values[~values.isnan()].sort().values
        truth = float(values[max(1, math.ceil(row["q"] * len(values))) - 1])
        assert row["lower"] <= truth <= row["upper"]
        assert row["lower"] <= row["value"] <= row["upper"]
        if 0 < abs(row["lower"]) < math.inf and 0 < abs(row["upper"]) < math.inf:
            assert abs(row["value"] - truth) <= (2 ** (1 / 8) - 1) * abs(truth) * (1 + 1e-12)


def test_a_histogram_without_a_value_has_null_quantiles_and_a_wrong_one_is_refused(tmp_path):
    history = record(tmp_path, [make_packet(1, {ATTN: summarize(torch.full((3,), math.nan), histogram=True)})])
    assert history.quantiles("attn", "activation", [0.5])["value"].to_pylist() == [None]
    with pytest.raises(ConfigurationError, match=r"\[0, 1\]"):
        history.quantiles("attn", "activation", [50])


# Coarse steps


def test_coarse_steps_are_the_merge_of_their_steps_with_spans(tmp_path):
    generator = torch.Generator().manual_seed(2)
    values = {step: torch.randn(16, generator=generator) for step in range(3, 25)}
    packets = [
        make_packet(step, {ATTN: summarize(v), GRAD: summarize(2 * v)})
        if step != 7
        else make_packet(step, {GRAD: summarize(2 * v)}, unobserved={ATTN: (Presence.CAPTURE_FAILED, "boom")})
        for step, v in values.items()
    ]
    history = record(tmp_path, packets, folding=FoldingPolicy((4, 2)))
    rows = history.coarsen(10, "attn", "activation", fields=SUMMARY_FIELDS).to_pylist()
    assert [(r["step_lo"], r["step_hi"], r["num_steps"], r["num_observed_steps"]) for r in rows] == [
        (3, 9, 7, 6),
        (10, 19, 10, 10),
        (20, 24, 5, 5),
    ]
    for row in rows:
        steps = [step for step in range(row["step_lo"], row["step_hi"] + 1) if step != 7]
        whole = summarize(torch.cat([values[step] for step in steps]))
        assert row["total"] == whole.total
        assert row["calls"] == len(steps)
        for field in ("min", "max", "sum", "mean", "std", "kurtosis", "rms"):
            assert row[field] == pytest.approx(getattr(whole, field), rel=1e-9)


def test_coarse_sums_of_a_sample_are_scaled_once_for_each_step(tmp_path):
    sampled = make_site("w", "update", numel=400, estimated=True)
    packets = [make_packet(step, {sampled: summarize(torch.full((100,), 3.0))}) for step in range(4)]
    (row,) = record(tmp_path, packets).coarsen(10, fields=["sum", "l2"]).to_pylist()
    assert (row["sum"], row["l2"]) == (4 * 1200.0, math.sqrt(4) * 60.0)


def test_a_series_whose_every_step_failed_is_coarse_null(tmp_path):
    history = record(tmp_path, [make_packet(1, {}, unobserved={ATTN: (Presence.CAPTURE_FAILED, "boom")})])
    (row,) = history.coarsen(10).to_pylist()
    assert (row["num_steps"], row["num_observed_steps"], row["total"], row["max"]) == (1, 0, None, None)


# Streams, conditions, columns of a merged observation


def test_a_stream_of_batches_has_the_rows_of_the_table(tmp_path):
    packets = [make_packet(step, {ATTN: ones(), GRAD: ones()}) for step in range(20)]
    history = record(tmp_path, packets, folding=FoldingPolicy((4, 2)))
    stream = history.observation_batches(kinds="gradient", columns=["step", "site", "rms"])
    table = history.observations(kinds="gradient", columns=["step", "site", "rms"])
    assert stream.read_all().to_pylist() == table.to_pylist()
    assert table.num_rows == 20


def test_a_condition_is_on_the_columns_that_are_asked_for(tmp_path):
    values = {step: torch.tensor([1.0, math.nan if step % 4 == 0 else 2.0]) for step in range(9)}
    history = record(tmp_path, [make_packet(step, {ATTN: summarize(v)}) for step, v in values.items()])
    found = history.observations(columns=["step", "nan"], where=pc.field("nan") > 0)
    assert found["step"].to_pylist() == [0, 4, 8]


def test_sites_are_listed_by_glob(tmp_path):
    sites = {make_site(name): ones() for name in ("layers.0.attn", "layers.1.attn", "head")}
    history = record(tmp_path, [make_packet(1, sites)])
    assert sorted(history.sites("layers.*")["site"].to_pylist()) == ["layers.0.attn", "layers.1.attn"]


def test_gradients_carry_the_loss_scale_of_their_step(tmp_path):
    facts = [StepFacts(grad_scale=scale) for scale in (1024.0, None, 512.0)]
    history = record(tmp_path, [make_packet(n, {ATTN: ones(), GRAD: ones()}, facts=f) for n, f in enumerate(facts)])
    rows = history.observations(columns=["step", "kind", "grad_scale"]).to_pylist()
    stamps = {kind: [r["grad_scale"] for r in rows if r["kind"] == kind] for kind in ("gradient", "activation")}
    assert stamps == {"gradient": [1024.0, None, 512.0], "activation": [None] * 3}


def test_rows_of_training_and_of_evaluation_are_told_apart(tmp_path):
    modes = ["train", "train", "eval", "mixed"]
    packets = [make_packet(n, {ATTN: ones()}, facts=StepFacts(mode=mode)) for n, mode in enumerate(modes)]
    history = record(tmp_path, packets)
    assert history.steps()["mode"].to_pylist() == modes
    assert history.observations(columns=["step", "mode"])["mode"].to_pylist() == modes
    evaluated = history.observations(columns=["step", "mode"], where=pc.field("mode") == "eval")
    assert evaluated["step"].to_pylist() == [2]
    batches = history.observation_batches(columns=["mode"], where=pc.field("mode") != "eval")
    assert batches.read_all()["mode"].to_pylist() == ["train", "train", "mixed"]


def test_an_observation_says_whether_its_replicas_agree(tmp_path):
    sites = [make_site(name) for name in "abc"]
    ids = np.sort(np.array([site.site_id for site in sites[:2]], np.uint64))
    zeros, digests = np.zeros(2, np.int64), np.zeros((2, 4))
    first = ReplicaTable.of_rank(0, ids, zeros, zeros, digests)
    differing = np.where(ids == np.uint64(sites[1].site_id), 9, 0).astype(np.int64)
    packet = make_packet(1, {site: ones() for site in sites})
    object.__setattr__(packet, "replicas", first.merge(ReplicaTable.of_rank(1, ids, zeros, differing, digests)))
    rows = record(tmp_path, [packet]).observations(columns=["site", "replicas"]).to_pylist()
    verdicts = {row["site"]: row["replicas"] for row in rows}
    assert verdicts == {"a": "agree", "b": "disagree", "c": "not_checked"}


def test_an_unknown_column_or_field_is_refused(tmp_path):
    history = record(tmp_path, [make_packet(1, {ATTN: ones()})])
    with pytest.raises(FieldUnknownError):
        history.coarsen(2, fields=["presence"])
    with pytest.raises(FieldUnknownError):
        history.observation_batches(columns=["presense"])


# Followers


def test_a_follower_gets_every_commit_once_across_folding_and_attempts(tmp_path):
    seen, cursor = [], None
    history = None
    for resume_step, steps in ((None, range(10)), (7, range(7, 15))):
        writer = HistoryWriter.create(
            tmp_path, {}, DEFAULT_DESCRIPTOR, resume_step, folding=FoldingPolicy((4, 2), grace_s=0.0)
        )
        history = history or open_history(tmp_path)
        for i, step in enumerate(make_steps(make_packet(s, {ATTN: ones()}) for s in steps)):
            writer.commit(step)
            assert writer.wait_folded(50)
            if i % 3 == 2:
                found = history.follow(cursor, columns=["step", "segment", "total"])
                cursor = found.cursor
                pairs = zip(found.steps["segment"].to_pylist(), found.steps["step"].to_pylist(), strict=True)
                seen += pairs
                assert found.observations.num_rows == found.steps.num_rows
        writer.close()
    rest = history.follow(cursor)
    seen += zip(rest.steps["segment"].to_pylist(), rest.steps["step"].to_pylist(), strict=True)
    assert seen == [(0, step) for step in range(10)] + [(1, step) for step in range(7, 15)]
    assert history.follow(rest.cursor).steps.num_rows == 0
    assert history.follow(rest.cursor).cursor == rest.cursor


# How much of its own size a step changes a weight


def test_the_update_to_weight_ratio_is_a_series_over_the_steps_that_have_both(tmp_path):
    update = make_site("w", "update", numel=4)
    halves, zeros = summarize(torch.full((4,), 0.5)), summarize(torch.zeros(4))
    packets = [
        make_packet(0, {WEIGHT: ones(), update: halves}),
        make_packet(1, {WEIGHT: ones()}),
        make_packet(2, {update: halves}),
        make_packet(3, {WEIGHT: zeros, update: halves}),
        make_packet(4, {WEIGHT: ones()}, unobserved={update: (Presence.SITE_ABSENT, "skipped")}),
        make_packet(5, {WEIGHT: ones(), update: zeros}),
    ]
    history = record(tmp_path, packets)
    found = history.series("w", "update", "update_to_weight")
    assert list(zip(found["step"].to_pylist(), found["value"].to_pylist(), strict=True)) == [
        (0, 0.5), (2, None), (3, None), (4, None), (5, 0.0),
    ]  # fmt: skip
    assert history.series("w", "update", "update_to_weight", steps=range(3))["step"].to_pylist() == [0, 2]
    with pytest.raises(FieldUnknownError, match="kind 'update'"):
        history.series("w", "parameter", "update_to_weight")
