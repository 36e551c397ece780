"""What the charts are drawn from is what the record says, number by number and state by state."""

import numpy as np
import pytest
import torch

from aggregator.history import open_history
from aggregator.report import grid as grids
from aggregator.report.grid import NONFINITE, CellState, read_grid, time_spans
from aggregator.report.order import depth_order, shortened
from aggregator.testing import make_packet, make_site
from telemetry.errors import FieldUnknownError, KindUnknownError
from telemetry.summary import SUMMARY_FIELDS, summarize
from tests.report.runs import ACTIVATIONS, KINDS, PARTS, packet, write


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_every_site_is_the_series_of_the_history(history_of, kind):
    history = history_of("healthy")
    grid = read_grid(history, kind, SUMMARY_FIELDS)
    for field in SUMMARY_FIELDS:
        for row, name in enumerate(grid.names):
            series = history.series(name, kind, field)
            assert series["step"].to_pylist() == grid.step_lo.tolist() == grid.step_hi.tolist()
            assert grid.fields[field][row].tolist() == [float(value) for value in series["value"].to_pylist()]


def test_the_ratio_of_all_sites_at_once_is_the_series_of_each(history_of):
    history = history_of("healthy")
    grid = read_grid(history, "update", ["update_to_weight"])
    for row, name in enumerate(grid.names):
        series = history.series(name, "update", "update_to_weight")["value"].to_pylist()
        assert grid.fields["update_to_weight"][row].tolist() == series


def test_missing_zero_nan_and_empty_are_states_of_their_own(history_of):
    grid = read_grid(history_of("troubled"), "activation", ["rms", "zero"])
    qkv, mlp, empty, dead = (grid.names.index(ACTIVATIONS[i].name) for i in (1, 2, 3, 4))
    at = {int(step): column for column, step in enumerate(grid.step_lo)}
    assert grid.state[qkv, at[20]] == CellState.SOME_NONFINITE
    assert grid.state[qkv, at[25]] == CellState.ALL_NONFINITE
    assert grid.state[mlp, at[30]] == CellState.MISSING
    assert grid.state[empty, at[25]] == CellState.EMPTY
    assert grid.state[dead, at[20]] == CellState.OBSERVED
    assert grid.fields["rms"][dead, at[20]] == 0.0
    assert np.isnan(grid.fields["rms"][[qkv, mlp, empty], [at[25], at[30], at[25]]]).all()
    assert (grid.state != CellState.OBSERVED).sum() == 4


def test_a_site_that_was_not_due_has_no_state_but_that(tmp_path):
    often, seldom = make_site("a"), make_site("b")
    packets = [
        make_packet(step, {site: summarize(torch.ones(2)) for site in (often, seldom)[: 2 if step % 4 == 0 else 1]})
        for step in range(8)
    ]
    grid = read_grid(open_history(write(tmp_path / "run", packets)), "activation")
    assert grid.state[grid.names.index("b")].tolist() == [1, 0, 0, 0] * 2


def test_wider_columns_lose_no_spike_and_no_nan(tmp_path):
    site = make_site("a")
    special = {7: torch.tensor([1.0, float("nan")]), 12: torch.tensor([1e6, 0.0])}
    packets = [make_packet(step, {site: summarize(special.get(step, torch.ones(2)))}) for step in range(20)]
    history = open_history(write(tmp_path / "run", packets))
    grid = read_grid(history, "activation", ["absmax", NONFINITE, "total"], every=5)
    assert grid.step_lo.tolist() == [0, 5, 10, 15]
    assert [grid.span(column) for column in range(2)] == ["steps 0–4", "steps 5–9"]
    assert grid.fields["absmax"][0].tolist() == [1.0, 1.0, 1e6, 1.0]
    assert grid.fields[NONFINITE][0].tolist() == [0, 1, 0, 0]
    assert grid.fields["total"][0].tolist() == [10] * 4
    assert grid.state[0].tolist() == [1, CellState.SOME_NONFINITE, 1, 1]


def test_columns_are_as_narrow_as_the_limit_allows(history_of):
    assert time_spans(history_of("healthy"), 12).every == 1
    spans = time_spans(history_of("healthy"), 6)
    assert spans.every == 10
    assert len(read_grid(history_of("healthy"), "update", every=spans.every).step_lo) == 6


def test_sites_that_are_read_a_few_at_a_time_make_the_same_grid(history_of, monkeypatch):
    whole = read_grid(history_of("troubled"), "gradient", SUMMARY_FIELDS)
    monkeypatch.setattr(grids, "_MAX_ROWS", 25)
    told = []
    parts = read_grid(history_of("troubled"), "gradient", SUMMARY_FIELDS, progress=lambda *done: told.append(done))
    assert parts.names == whole.names
    assert all(np.array_equal(parts.fields[f], whole.fields[f], equal_nan=True) for f in SUMMARY_FIELDS)
    assert [share for _, share in told] == sorted(share for _, share in told)
    assert len(told) == 4
    assert told[-1][1] == 1.0


def test_a_site_that_became_another_thing_has_a_row_for_each(tmp_path):
    before, after = make_site("w", "parameter", dtype="float32"), make_site("w", "parameter", dtype="bfloat16")
    packets = [make_packet(step, {before if step < 3 else after: summarize(torch.ones(2))}) for step in range(5)]
    grid = read_grid(open_history(write(tmp_path / "run", packets)), "parameter")
    assert grid.names == ("w #0", "w #1")
    assert grid.state.tolist() == [[1, 1, 1, 0, 0], [0, 0, 0, 1, 1]]


def test_a_replayed_step_is_there_once_as_the_last_attempt_left_it(history_of):
    grid = read_grid(history_of("troubled"), "parameter")
    assert grid.step_lo.tolist() == list(range(0, 60, 5))


def test_a_wrong_name_is_refused_with_near_ones(history_of):
    with pytest.raises(FieldUnknownError, match="near it: rms"):
        read_grid(history_of("healthy"), "activation", ["rmss"])
    with pytest.raises(KindUnknownError, match="activation_grad"):
        read_grid(history_of("healthy"), "activations")


def test_parts_stand_from_input_to_output():
    ran = ["embed", "layers.0.attention", "layers.0.mlp", "layers.0", "layers.2.mlp", "layers.10.mlp", "norm", "head"]
    assert depth_order(sorted(ran), ran) == ran
    weights = ["head.weight", "layers.10.mlp.up.weight", "layers.2.mlp.bias", "embed.weight", "norm.bias"]
    expected = ["embed.weight", "layers.2.mlp.bias", "layers.10.mlp.up.weight", "norm.bias", "head.weight"]
    assert depth_order(weights, ran) == expected
    assert depth_order(["10.w", "9.w", "0.w"], []) == ["0.w", "9.w", "10.w"]
    assert sorted(depth_order(PARTS, [])) == sorted(PARTS)


def test_a_long_name_keeps_both_ends():
    assert shortened("layers.0", 8) == "layers.0"
    short = shortened(PARTS[5], 36)
    assert len(short) == 36
    assert short.startswith("model.")
    assert short.endswith("feed_forward.gate")


def test_a_step_without_that_kind_is_no_column(tmp_path):
    history = open_history(write(tmp_path / "run", [packet(0), packet(5, sites=ACTIVATIONS)]))
    assert read_grid(history, "gradient").step_lo.tolist() == [0]
    assert read_grid(history, "activation").step_lo.tolist() == [0, 5]
