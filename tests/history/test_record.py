"""What is committed is what is read: values, absences, growth, and refusals of names."""

import math

import numpy as np
import pytest
import torch

from aggregator.history import FoldingPolicy, HistoryWriter, open_history
from aggregator.history import intake as intake_module
from aggregator.merge import merge_packets
from aggregator.testing.packets import make_packet, make_site, make_step, make_steps
from telemetry.errors import (
    FieldUnknownError,
    HistogramAbsentError,
    HistoryNotFoundError,
    KindUnknownError,
    SiteUnknownError,
    StepOrderError,
)
from telemetry.packet import StepFacts
from telemetry.presence import Presence
from telemetry.summary import DEFAULT_DESCRIPTOR, SUMMARY_FIELDS, summarize

ATTN, GRAD = make_site("layers.0.attn"), make_site("layers.0.attn", "gradient")


def record(path, packets, **create):
    writer = HistoryWriter.create(path, {"name": "t"}, DEFAULT_DESCRIPTOR, **create)
    for step in make_steps(packets):
        writer.commit(step)
    writer.close()
    return open_history(path)


def test_every_field_of_every_step_reads_back_as_it_was_committed(tmp_path):
    generator = torch.Generator().manual_seed(1)
    summaries = {step: summarize(torch.randn(50, generator=generator), histogram=True) for step in range(1, 80)}
    history = record(tmp_path / "run", [make_packet(step, {ATTN: s}) for step, s in summaries.items()])
    for field in SUMMARY_FIELDS:
        series = history.series("layers.0.attn", "activation", field).to_pydict()
        assert series["step"] == list(summaries)
        assert series["value"] == [getattr(summary, field) for summary in summaries.values()]
    assert all(history.histogram("layers.0.attn", "activation", n) == s.histogram for n, s in summaries.items())


def test_missing_zero_and_nan_stay_three_different_things(tmp_path):
    packets = [
        make_packet(1, {ATTN: summarize(torch.tensor([0.0, 0.0]))}),
        make_packet(2, {ATTN: summarize(torch.tensor([math.nan, math.inf]))}),
        make_packet(3, {}, unobserved={ATTN: (Presence.CAPTURE_FAILED, "RuntimeError: boom")}),
        make_packet(4, {}, unobserved={ATTN: (Presence.BUDGET_DROPPED, "over budget")}),
        make_packet(5, {}, unobserved={ATTN: (Presence.NOT_SCHEDULED, "")}),
        make_packet(6, {ATTN: summarize(torch.empty(0))}),
    ]
    history = record(tmp_path / "run", packets)
    columns = ["step", "presence", "reason", "finite", "nan", "mean", "max", "rms"]
    rows = [tuple(row.values()) for row in history.observations(columns=columns).to_pylist()]
    assert rows == [
        (1, "observed", None, 2, 0, 0.0, 0.0, 0.0),
        (2, "observed", None, 0, 1, None, None, None),
        (3, "capture_failed", "RuntimeError: boom", None, None, None, None, None),
        (4, "budget_dropped", "over budget", None, None, None, None, None),
        (6, "observed", None, 0, 0, None, None, None),
    ]
    assert history.steps()["step"].to_pylist() == [1, 2, 3, 4, 5, 6]


def test_a_site_first_seen_in_step_2_has_rows_from_there_on_and_leaves_the_others_alone(tmp_path):
    ones = summarize(torch.ones(3))
    history = record(tmp_path / "run", [make_packet(1, {ATTN: ones}), make_packet(2, {ATTN: ones, GRAD: ones})])
    sites = {(row["site"], row["kind"]): row["first_step"] for row in history.sites().to_pylist()}
    assert sites == {("layers.0.attn", "activation"): 1, ("layers.0.attn", "gradient"): 2}
    assert history.series("layers.0.attn", "activation", "total").to_pydict() == {"step": [1, 2], "value": [3, 3]}
    assert history.series("layers.0.attn", "gradient", "total").to_pydict() == {"step": [2], "value": [3]}


def test_a_statistic_that_older_rows_lack_is_null_in_them_and_so_is_what_follows_from_it(tmp_path, monkeypatch):
    summary = summarize(torch.tensor([1.0, 2.0, 4.0]))
    older = intake_module.encode_observations
    with monkeypatch.context() as patch:
        patch.setattr(intake_module, "encode_observations", lambda packet: older(packet).drop_columns(["m4", "zero"]))
        record(tmp_path, [make_packet(1, {ATTN: summary})])
    history = record(tmp_path, [make_packet(2, {ATTN: summary})], resume_step=2)
    rows = history.observations(columns=["step", "zero", "m4", "kurtosis", "std"]).to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        (1, None, None, None, summary.std),
        (2, 0, summary.m4, summary.kurtosis, summary.std),
    ]


def test_a_name_gained_later_is_in_the_site_table(tmp_path):
    ones = summarize(torch.ones(3))
    tied = make_site("layers.0.attn", aliases=("head",))
    history = record(tmp_path / "run", [make_packet(1, {ATTN: ones}), make_packet(2, {tied: ones})])
    assert history.sites().select(["aliases", "first_step"]).to_pylist() == [{"aliases": ["head"], "first_step": 1}]


def test_coverage_names_the_ranks_that_are_missing_and_why(tmp_path):
    ones = summarize(torch.ones(3))
    writer = HistoryWriter.create(tmp_path, {}, DEFAULT_DESCRIPTOR)
    packets = [make_packet(7, {ATTN: ones}, rank=rank, world_size=4) for rank in range(3)]
    packets[1] = packets[1].abstaining("too many steps in flight")
    writer.commit(make_step(merge_packets(packets), missing={3: "deadline of 5 s"}))
    history = open_history(tmp_path)
    assert history.coverage().to_pylist() == [
        {
            "step": 7,
            "num_ranks": 2,
            "world_size": 4,
            "missing_ranks": [1, 3],
            "missing_reasons": ["too many steps in flight", "deadline of 5 s"],
        }
    ]
    assert history.steps()["abstained_ranks"].to_pylist() == [[1]]
    assert history.observations(columns=["num_observed", "total"]).to_pylist() == [{"num_observed": 2, "total": 6}]


def test_the_facts_of_a_step_and_its_findings_are_kept_whole(tmp_path):
    facts = StepFacts(
        num_applied=3,
        num_skipped=1,
        skipped_ranks=(2,),
        num_micro_batches=8,
        grad_scale=1024.0,
        mode="eval",
        step_s=0.25,
    )
    finding = {
        "code": "replica_divergence",
        "message": "they differ",
        "rank": 3,
        "site": "w",
        "deltas": [1.5, math.nan],
    }
    packet = make_packet(4, {}, facts=facts, findings=[finding])
    history = record(tmp_path / "run", [packet])
    row = history.steps().to_pylist()[0]
    assert StepFacts.from_wire({name: row[name] for name in vars(facts)}) == facts
    found = history.findings().to_pylist()[0]
    assert (found["step"], found["code"], found["rank"], found["site"]) == (4, "replica_divergence", 3, "w")
    assert '"deltas":[1.5,null]' in found["details"]


def test_sums_and_norm_of_a_sampled_site_are_scaled_to_the_whole_and_marked(tmp_path):
    sampled = make_site("w", "update", numel=400, estimated=True)
    history = record(tmp_path / "run", [make_packet(1, {sampled: summarize(torch.full((100,), 3.0))})])

    def value(field):
        return history.series("w", "update", field)["value"].to_pylist()[0]

    assert (value("l2"), value("sum"), value("sum_sq"), value("sum_abs")) == (60.0, 1200.0, 3600.0, 1200.0)
    assert (value("total"), value("mean"), value("absmax")) == (100, 3.0, 3.0)
    assert history.series("w", "update", "l2").schema.metadata == {b"estimated": b"true"}
    assert history.observations(columns=["estimated", "l2"]).to_pylist() == [{"estimated": True, "l2": 60.0}]


def test_observations_are_selected_by_site_kind_and_step(tmp_path):
    ones = summarize(torch.ones(3))
    history = record(tmp_path / "run", [make_packet(step, {ATTN: ones, GRAD: ones}) for step in range(100)])
    assert history.observations().num_rows == 200
    assert history.observations(kinds="gradient").num_rows == 100
    assert history.observations("layers.0.attn", ["gradient"], range(10, 50, 10), ["step"]).to_pydict() == {
        "step": [10, 20, 30, 40]
    }
    assert history.observations(kinds="gradient", steps=[99, 3], columns=["step"]).to_pydict() == {"step": [3, 99]}
    assert history.observations(steps=range(5, 5)).num_rows == 0


def test_an_unknown_name_is_refused_with_those_near_it(tmp_path):
    history = record(tmp_path / "run", [make_packet(1, {ATTN: summarize(torch.ones(3))})])
    with pytest.raises(SiteUnknownError, match=r"near it: layers\.0\.attn"):
        history.series("layers.0.atn", "activation", "rms")
    with pytest.raises(KindUnknownError, match="there are \\['activation'\\]"):
        history.series("layers.0.attn", "gradient", "rms")
    with pytest.raises(FieldUnknownError, match="near it: std"):
        history.series("layers.0.attn", "activation", "stdd")
    with pytest.raises(FieldUnknownError, match="near it: presence"):
        history.observations(columns=["presense"])
    with pytest.raises(HistogramAbsentError, match="no histogram at step 1"):
        history.histogram("layers.0.attn", "activation", 1)


def test_a_run_without_a_step_has_empty_tables_with_all_columns(tmp_path):
    HistoryWriter.create(tmp_path, {}, DEFAULT_DESCRIPTOR)
    history = open_history(tmp_path)
    assert history.steps().num_rows == history.sites().num_rows == history.findings().num_rows == 0
    assert "absmax" in history.observations().column_names
    with pytest.raises(SiteUnknownError):
        history.series("x", "activation", "rms")


def test_what_is_no_run_is_refused_by_its_path(tmp_path):
    (tmp_path / "file").write_text("x")
    for path, text in (
        (tmp_path / "nowhere", "does not exist"),
        (tmp_path, "holds no run"),
        (tmp_path / "file", "is no"),
    ):
        with pytest.raises(HistoryNotFoundError, match=text):
            open_history(path)


def test_a_step_that_does_not_increase_is_refused_and_changes_nothing(tmp_path):
    writer = HistoryWriter.create(tmp_path, {}, DEFAULT_DESCRIPTOR)
    writer.commit(make_step(make_packet(5, {ATTN: summarize(torch.ones(3))})))
    for step in (5, 4):
        with pytest.raises(StepOrderError):
            writer.commit(make_step(make_packet(step, {})))
    writer.commit(make_step(make_packet(6, {})))
    assert open_history(tmp_path).steps()["step"].to_pylist() == [5, 6]


def newest_index_bytes(segment):
    return max(segment.glob("index-*"), key=lambda file: file.name).stat().st_size


def test_the_index_stays_short_in_a_long_run(tmp_path):
    writer = HistoryWriter.create(tmp_path, {}, DEFAULT_DESCRIPTOR, folding=FoldingPolicy((8, 8)))
    sizes = []
    for step in make_steps(make_packet(step, {}) for step in range(300)):
        writer.commit(step)
        if step.step % 50 == 49:
            assert writer.wait_folded(50)
            sizes.append(newest_index_bytes(tmp_path / "seg-00000"))
    writer.close()
    assert max(sizes) < 12_000  # Unfolded it would have 300 rows of at least 100 bytes each.
    assert len(list((tmp_path / "seg-00000" / "c").iterdir())) < 40
    assert open_history(tmp_path).steps()["step"].to_pylist() == list(range(300))


def test_counts_beyond_float_precision_survive(tmp_path):
    summary = summarize(torch.ones(1))
    packet = make_packet(1, {ATTN: summary})
    packet.ints[:, :2] = 2**60 + 1
    history = record(tmp_path / "run", [packet])
    assert history.series("layers.0.attn", "activation", "total")["value"].to_pylist() == [2**60 + 1]
    assert np.dtype("int64") == history.series("layers.0.attn", "activation", "total")["value"].to_numpy().dtype
