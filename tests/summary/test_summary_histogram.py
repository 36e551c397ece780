"""The grid: coarser grids are sums of finer ones, and quantiles keep their promise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.errors import ConfigurationError, SketchDescriptorError
from telemetry.summary import DEFAULT_DESCRIPTOR, Histogram, HistogramDescriptor, summarize

floats = st.floats(width=32, allow_nan=True, allow_infinity=True)


@settings(deadline=None)
@given(st.lists(floats, max_size=60), st.sampled_from([8, 4, 2, 1]), st.sampled_from([8, 4, 2, 1]))
def test_coarsening_gives_what_the_coarser_grid_would_have_counted(values, fine, coarse):
    tensor = torch.tensor(values, dtype=torch.float32)
    histogram = summarize(tensor, histogram=HistogramDescriptor(bins_per_octave=fine)).histogram
    if coarse > fine:
        with pytest.raises(SketchDescriptorError, match="cannot become"):
            histogram.coarsen(coarse)
    else:
        expected = summarize(tensor, histogram=HistogramDescriptor(bins_per_octave=coarse)).histogram
        assert histogram.coarsen(coarse) == expected


def test_a_grid_of_three_bins_to_the_octave_is_refused():
    with pytest.raises(SketchDescriptorError, match="bins_per_octave is 3"):
        summarize(torch.ones(2), histogram=True).histogram.coarsen(3)


@settings(deadline=None)
@given(st.lists(floats.filter(lambda x: x == x), min_size=1, max_size=60), st.floats(0, 1))
def test_the_exact_quantile_lies_within_the_bounds(values, q):
    quantile = summarize(torch.tensor(values, dtype=torch.float32), histogram=True).histogram.quantile(q)
    rank = max(1, int(np.ceil(q * len(values))))
    exact = float(np.sort(np.array(values, dtype=np.float32))[rank - 1])
    assert quantile.lower <= exact <= quantile.upper
    assert quantile.lower <= quantile.value <= quantile.upper


@pytest.mark.parametrize("bins_per_octave", [1, 2, 4, 8])
def test_a_quantile_inside_the_window_is_off_by_half_a_bin_at_most(bins_per_octave):
    tensor = torch.randn(10_000, generator=torch.Generator().manual_seed(6)).exp()
    grid = HistogramDescriptor(bins_per_octave=bins_per_octave)
    histogram = summarize(tensor, histogram=grid).histogram
    for q in (0.001, 0.1, 0.5, 0.9, 0.999):
        exact = np.quantile(tensor.double().numpy(), q, method="inverted_cdf")
        factor = histogram.quantile(q).value / exact
        assert abs(np.log2(factor)) <= 0.5 / bins_per_octave + 1e-12


def test_quantiles_of_special_values_are_themselves():
    histogram = summarize(torch.tensor([-np.inf, 0.0, 0.0, np.inf, np.nan]), histogram=True).histogram
    assert [histogram.quantile(q).value for q in (0, 0.5, 1)] == [-np.inf, 0.0, np.inf]
    low, high = summarize(torch.tensor([1e-30, 1e30]), histogram=True).histogram.quantile(0), None
    assert (low.lower, low.upper) == (0.0, 2.0**-48)
    high = summarize(torch.tensor([1e-30, 1e30]), histogram=True).histogram.quantile(1)
    assert (high.lower, high.value, high.upper) == (2.0**16, 2.0**16, np.inf)
    negative = summarize(torch.tensor([-3.0]), histogram=True).histogram.quantile(0.5)
    assert negative.lower <= -3.0 <= negative.upper < 0


def test_no_values_have_no_quantile_and_a_share_beyond_one_is_refused():
    empty = summarize(torch.tensor([np.nan]), histogram=True).histogram
    assert np.isnan(empty.quantile(0.5).value)
    with pytest.raises(ConfigurationError, match=r"1\.5"):
        empty.quantile(1.5)


def test_bounds_follow_one_another_in_ascending_order():
    lower, upper = DEFAULT_DESCRIPTOR.bounds()
    assert lower.shape == upper.shape == (DEFAULT_DESCRIPTOR.num_counts,)
    assert (lower[:-1] <= upper[:-1]).all()
    np.testing.assert_array_equal(lower[2:-2], upper[1:-3])
    np.testing.assert_array_equal(lower[:-1], -upper[-2::-1])


def test_extreme_values_have_a_bin_and_bounded_edges():
    histogram = summarize(torch.tensor([0.0, 1e-12, 1e12]), histogram=True).histogram
    lower, upper = histogram.descriptor.bounds()
    assert histogram.total == 3
    assert (np.diff(histogram.descriptor.edges()) > 0).all()
    assert (lower[:-1] <= upper[:-1]).all()


def test_a_descriptor_survives_the_wire_and_one_of_another_version_refuses():
    assert HistogramDescriptor.from_wire(DEFAULT_DESCRIPTOR.to_wire()) == DEFAULT_DESCRIPTOR
    with pytest.raises(SketchDescriptorError, match="version=2"):
        HistogramDescriptor.from_wire({**DEFAULT_DESCRIPTOR.to_wire(), "version": 2})


def test_counts_cannot_be_changed_after_the_fact():
    histogram = Histogram(DEFAULT_DESCRIPTOR, np.zeros(DEFAULT_DESCRIPTOR.num_counts, np.int64))
    with pytest.raises(ValueError, match="read-only"):
        histogram.counts[0] = 1
