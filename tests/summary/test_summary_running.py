"""Streaming statistics say what one summary of everything would."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from telemetry.errors import SketchDescriptorMismatchError
from telemetry.summary import (
    DEFAULT_DESCRIPTOR,
    HistogramDescriptor,
    RunningHistogram,
    RunningStats,
    TensorSummary,
    summarize,
)
from tests.summary.summary_oracle import assert_counts_equal, assert_floats_close, elements


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(size, generator=generator) * 3 + 1 for size in (100, 1, 0, 5000, 33)]


def test_updates_add_up_to_the_summary_of_everything(backend):
    stats = RunningStats(histogram=True)
    for batch in batches():
        stats.update(batch)
    values = elements(torch.cat(batches()))
    result = stats.result()
    assert result.calls == 5
    assert result.histogram == summarize(torch.cat(batches()), histogram=True).histogram
    assert (result.total, result.min, result.max) == (values.size, values.min(), values.max())
    assert_floats_close(result, values)


def test_updates_give_bit_for_bit_what_merging_summaries_gives(backend):
    stats, merged = RunningStats(), TensorSummary.empty()
    for batch in batches():
        stats.update(batch)
        merged = merged.merge(summarize(batch))
    assert stats.result() == merged


def test_statistics_of_two_workers_merge_and_survive_a_pickle(backend):
    workers = [RunningStats(histogram=True) for _ in range(2)]
    for index, batch in enumerate(batches()):
        workers[index % 2].update(batch)
    first, second = pickle.loads(pickle.dumps(workers))
    result = first.merge(second).result()
    assert_counts_equal_but_calls(result, torch.cat(batches()))
    assert second.result().calls == 2


def assert_counts_equal_but_calls(result: TensorSummary, whole: torch.Tensor) -> None:
    expected = summarize(whole, histogram=True)
    np.testing.assert_array_equal(result._ints[:-1], expected._ints[:-1])
    assert result.histogram == expected.histogram


def test_a_result_does_not_change_with_later_updates(backend):
    stats = RunningStats(histogram=True).update(torch.ones(3))
    before = stats.result()
    stats.update(torch.ones(4))
    assert (before.total, before.histogram.total) == (3, 3)
    assert stats.result().total == 7


def test_after_a_reset_nothing_is_left(backend):
    stats = RunningStats(histogram=True).update(torch.ones(3)).reset()
    empty = stats.result()
    assert empty == TensorSummary(empty._ints, empty._floats, empty.histogram)
    assert (empty.total, empty.calls, empty.histogram.total) == (0, 0, 0)
    assert stats.update(torch.zeros(2)).result().zero == 2


def test_masks_weights_and_errors_are_those_of_summarize(backend):
    stats = RunningStats()
    stats.update(torch.tensor([1.0, 9.0]), mask=torch.tensor([True, False]))
    stats.update(torch.tensor([1.0, 4.0]), weights=torch.tensor([0, 3]))
    assert (stats.result().total, stats.result().sum) == (4, 13.0)


def test_a_running_histogram_counts_and_merges(backend):
    first, second = RunningHistogram(), RunningHistogram()
    first.update(torch.ones(10)).update(torch.zeros(5))
    second.update(torch.full((3,), -1.0), mask=torch.tensor([True, True, False]))
    result = first.merge(second).result()
    assert_counts_equal(
        summarize(torch.tensor([1.0] * 10 + [0.0] * 5 + [-1.0] * 2), histogram=True),
        np.array([1.0] * 10 + [0.0] * 5 + [-1.0] * 2),
    )
    assert result == summarize(torch.tensor([1.0] * 10 + [0.0] * 5 + [-1.0] * 2), histogram=True).histogram
    assert first.reset().result().total == 0
    assert RunningHistogram().result().descriptor == DEFAULT_DESCRIPTOR


def test_statistics_on_two_grids_refuse_to_merge():
    with pytest.raises(SketchDescriptorMismatchError, match="bins_per_octave=8"):
        RunningStats(True).merge(RunningStats(HistogramDescriptor(bins_per_octave=8)))
    with pytest.raises(SketchDescriptorMismatchError):
        RunningHistogram().merge(RunningHistogram(HistogramDescriptor(lo_exp=-10)))
