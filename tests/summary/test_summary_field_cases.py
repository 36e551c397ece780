"""Faults that other tools are known for, each reduced to its smallest input."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from telemetry.summary import DEFAULT_DESCRIPTOR, Histogram, TensorSummary, summarize
from telemetry.summary.fields import FINITE, NUM_FLOATS, NUM_INTS, SUM_SQ, TOTAL


def merged(*tensors: torch.Tensor) -> TensorSummary:
    summary = TensorSummary.empty()
    for tensor in tensors:
        summary = summary.merge(summarize(tensor, histogram=True))
    return summary


def test_the_mean_over_uneven_ranks_divides_once(backend):
    assert merged(torch.ones(3), torch.ones(2)).mean == 1.0


def test_micro_batches_weigh_by_their_tokens(backend):
    assert merged(torch.tensor([1.0] * 4), torch.tensor([6.0])).mean == 2.0


def test_bin_counts_and_sums_of_squares_stay_exact_past_24_bits():
    def summary(count: int) -> TensorSummary:
        ints, floats = np.zeros(NUM_INTS, np.int64), np.zeros(NUM_FLOATS)
        ints[TOTAL] = ints[FINITE] = count
        floats[SUM_SQ] = count
        counts = np.zeros(DEFAULT_DESCRIPTOR.num_counts, np.int64)
        counts[300] = count
        return TensorSummary(ints, floats, Histogram(DEFAULT_DESCRIPTOR, counts))

    both = summary(2**24).merge(summary(1))
    assert both.sum_sq == 16_777_217
    assert both.histogram.counts[300] == 16_777_217
    assert both.total == 16_777_217


def test_a_count_past_24_bits_is_exact_and_extremes_have_names_of_their_own(backend):
    assert merged(torch.ones(1 << 24, dtype=torch.int8), torch.ones(1)).total == (1 << 24) + 1
    signed = summarize(torch.tensor([-3.0, 1.0]))
    assert (signed.min, signed.max, signed.absmax) == (-3.0, 1.0, 3.0)


def test_a_sum_of_ones_past_24_bits_is_exact(backend):
    summary = summarize(torch.ones((1 << 24) + 1))
    assert (summary.total, summary.sum) == ((1 << 24) + 1, (1 << 24) + 1)
    assert (summary.mean, summary.m2) == (1.0, 0.0)


def test_equal_half_values_fill_one_bin_however_they_are_split(backend):
    whole = torch.full((5000,), 0.3, dtype=torch.float16)
    for parts in ([whole], [whole[i::3] for i in range(3)], list(whole.split(1234))):
        counts = merged(*parts).histogram.counts
        assert counts.max() == counts.sum() == 5000


def test_half_values_near_their_maximum_do_not_overflow(backend):
    summary = summarize(torch.tensor([40000.0] * 3, dtype=torch.float16))
    assert (summary.mean, summary.var) == (40000.0, 0.0)
    assert summary.l2 == pytest.approx(69282.0323, rel=1e-9)


def test_partial_half_norms_combine_by_their_squares(backend):
    part = torch.full((1,), 5000.0, dtype=torch.float16)
    assert merged(part, part).l2 == pytest.approx(7071.0678, rel=1e-8)


def test_a_norm_past_the_square_root_of_the_float32_maximum_is_finite(backend):
    assert summarize(torch.tensor([1e20, 1.0, 1.0])).l2 == pytest.approx(1e20, rel=1e-7)


def test_squares_of_the_float32_maximum_do_not_overflow(backend):
    top = torch.finfo(torch.float32).max
    assert summarize(torch.tensor([top, -top])).sum_sq == pytest.approx(2 * top**2, rel=1e-15)


def test_the_variance_of_a_small_spread_on_a_large_mean_survives_a_merge_of_ranks(backend):
    values = torch.tensor([1e8 - 1, 1e8, 1e8 + 1], dtype=torch.float64).repeat(1000)
    assert merged(*values.chunk(4)).var == pytest.approx(2 / 3, rel=1e-10)


def test_mean_and_spread_of_a_large_offset_agree_with_float64(backend):
    tensor = (torch.randn(1 << 18, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1e5).float()
    summary, exact = summarize(tensor), tensor.double()
    assert summary.mean == pytest.approx(exact.mean().item(), rel=1e-12)
    assert summary.std == pytest.approx(exact.std(correction=0).item(), rel=1e-9)


def test_non_finite_values_are_counted_apart_and_left_out_of_the_mean(backend):
    summary = summarize(torch.tensor([1.0, 2.0, np.nan, np.inf, -np.inf]))
    assert (summary.total, summary.finite, summary.nan, summary.pos_inf, summary.neg_inf) == (5, 2, 1, 1, 1)
    assert summary.mean == 1.5


def test_an_all_nan_tensor_has_a_row_with_nothing_finite_and_no_value(backend):
    summary = summarize(torch.full((9,), np.nan), histogram=True)
    assert (summary.total, summary.finite, summary.nan, summary.calls) == (9, 0, 9, 1)
    assert np.isnan(summary.mean)
    assert np.isnan(summary.max)
    assert summary.histogram.counts[-1] == 9


def test_mixed_values_give_every_field_of_the_worked_example(backend):
    summary = summarize(torch.tensor([1.0, -2.0, 0.0, np.nan, np.inf, -np.inf]))
    assert (summary.total, summary.nan, summary.pos_inf, summary.neg_inf, summary.zero) == (6, 1, 1, 1, 1)
    assert (summary.sum_abs, summary.sum_sq, summary.absmax) == (3.0, 5.0, 2.0)
    n, mean = summary.finite, summary.mean
    fourth = summary.m4 + 4 * mean * summary.m3 + 6 * mean**2 * summary.m2 + n * mean**4
    assert fourth == pytest.approx(17.0, rel=1e-14)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_global_norm_does_not_depend_on_the_number_of_pipeline_stages(backend, stages):
    generator = torch.Generator().manual_seed(8)
    gradients = [torch.randn(1000, generator=generator).to(torch.bfloat16) for _ in range(8)]
    by_stage = [merged(*gradients[stage::stages]) for stage in range(stages)]
    norm = np.sqrt(sum(summary.sum_sq for summary in by_stage))
    assert norm == pytest.approx(torch.cat(gradients).double().norm().item(), rel=1e-12)


def test_an_update_lost_to_rounding_is_seen_as_zero(backend):
    before = torch.full((64,), 0.02, dtype=torch.bfloat16)
    after = before + 3e-6
    assert summarize(after - before).zero_fraction == 1.0
