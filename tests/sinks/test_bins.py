"""Bins for trackers hold every finite value once, between edges of the grid, however few a tracker takes."""

import numpy as np
import pytest
import torch

from aggregator.sinks.bins import coarsened_bins, finite_bins
from telemetry.summary import HistogramDescriptor, summarize

WIDEST = HistogramDescriptor(bins_per_octave=8, lo_exp=-126, hi_exp=127)


def histogram(values, descriptor=None):
    return summarize(torch.as_tensor(values), histogram=descriptor or True).histogram


def everywhere():
    magnitudes = torch.exp2(torch.linspace(-140, 127.9, 9000, dtype=torch.float64)).float()
    return torch.cat((magnitudes, -magnitudes, torch.zeros(3), torch.tensor([torch.nan, torch.inf])))


def counted(values, bins):
    """Count anew: a bin is closed at the edge that is nearer to zero, and zero has one of its own in front of 0."""
    finite = values[torch.isfinite(values)].double().numpy()
    index = np.where(
        finite > 0,
        np.searchsorted(bins.edges, finite, side="right") - 1,
        np.searchsorted(bins.edges, finite, side="left") - 1,
    )
    return np.bincount(index, minlength=len(bins.counts))


@pytest.mark.parametrize("descriptor", [HistogramDescriptor(), WIDEST], ids=["default", "widest"])
def test_coarsened_bins_fit_keep_the_total_and_recount_exactly(descriptor):
    values = everywhere()
    fine = histogram(values, descriptor)
    before = fine.counts.copy()
    bins, bins_per_octave = coarsened_bins(fine, 512)
    assert len(bins.counts) <= 512
    assert bins_per_octave < descriptor.bins_per_octave
    assert bins.counts.sum() == torch.isfinite(values).sum()
    assert np.array_equal(counted(values, bins), bins.counts)
    assert np.isin(bins.edges, finite_bins(fine).edges).all()
    assert np.array_equal(fine.counts, before)


def test_what_fits_is_not_coarsened():
    fine = histogram(torch.randn(1000, generator=torch.Generator().manual_seed(0)))
    bins, bins_per_octave = coarsened_bins(fine, 512)
    assert bins_per_octave == 4
    assert np.array_equal(bins.counts, finite_bins(fine).counts)


def test_without_finite_values_there_are_no_bins():
    assert finite_bins(histogram([torch.nan, torch.inf])) is None
    assert coarsened_bins(histogram([torch.nan]), 512) is None
