"""Merge: exact and in any order for integers, with an identity, and the same whoever computed the parts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.errors import SketchDescriptorMismatchError
from telemetry.summary import HistogramDescriptor, TensorSummary, available_backends, summarize, using_backend
from telemetry.summary.merge import merge_packed
from tests.summary.summary_oracle import FLOATS, INTEGERS, assert_floats_close, elements

finite = st.floats(-1e6, 1e6, width=32)
lists = st.lists(st.one_of(finite, st.sampled_from([0.0, -0.0, np.inf, -np.inf, np.nan])), max_size=40)


def of(values: list[float]) -> TensorSummary:
    return summarize(torch.tensor(values, dtype=torch.float32), histogram=True)


@settings(deadline=None)
@given(lists, lists)
def test_counts_merge_the_same_in_either_order(a, b):
    ab, ba = of(a).merge(of(b)), of(b).merge(of(a))
    np.testing.assert_array_equal(ab._ints, ba._ints)
    assert ab.histogram == ba.histogram


@settings(deadline=None)
@given(lists, lists, lists)
def test_counts_merge_the_same_however_they_are_bracketed(a, b, c):
    left, right = of(a).merge(of(b)).merge(of(c)), of(a).merge(of(b).merge(of(c)))
    np.testing.assert_array_equal(left._ints, right._ints)
    assert left.histogram == right.histogram


@settings(deadline=None)
@given(lists)
def test_the_empty_summary_is_the_identity(a):
    summary = of(a)
    assert TensorSummary.empty().merge(summary) == summary
    assert summary.merge(TensorSummary.empty()) == summary


def strided_parts(tensor: torch.Tensor, num: int) -> list[torch.Tensor]:
    return [tensor[start::num] for start in range(num)]


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
@pytest.mark.parametrize("split", [torch.tensor_split, strided_parts], ids=["by rank", "by stride"])
def test_a_split_over_ranks_or_strides_merges_to_the_histogram_of_the_whole(backend, split, dtype):
    whole = torch.from_numpy(np.random.default_rng(3).integers(0, 120, 5000)).to(dtype)
    parts = [summarize(part, histogram=True) for part in split(whole, 7)]
    merged = parts[0]
    for part in parts[1:]:
        merged = merged.merge(part)
    expected = summarize(whole, histogram=True)
    assert merged.histogram == expected.histogram
    np.testing.assert_array_equal(merged._ints[:-1], expected._ints[:-1])
    assert_floats_close(merged, elements(whole))


def test_records_of_different_backends_merge_as_those_of_one():
    whole = torch.randn(10_000, generator=torch.Generator().manual_seed(5)) + 100
    parts = []
    for index, part in enumerate(whole.chunk(8)):
        with using_backend(available_backends()[index % len(available_backends())]):
            parts.append(summarize(part, histogram=True))
    merged = parts[0]
    for part in parts[1:]:
        merged = merged.merge(part)
    assert merged.histogram == summarize(whole, histogram=True).histogram
    assert_floats_close(merged, elements(whole))


def test_merging_leaves_its_inputs_alone():
    a, b = of([1.0, 2.0]), of([3.0, 4.0])
    before = (a.to_dict(), b.to_dict())
    merge_packed((a._ints, a._floats), (b._ints, b._floats))
    a.merge(b)
    assert (a.to_dict(), b.to_dict()) == before


def test_two_grids_refuse_to_merge_and_say_which_they_are():
    a = summarize(torch.ones(3), histogram=True)
    b = summarize(torch.ones(3), histogram=HistogramDescriptor(bins_per_octave=8))
    with pytest.raises(SketchDescriptorMismatchError, match=r"bins_per_octave=4.*bins_per_octave=8"):
        a.merge(b)


def test_a_histogram_and_none_refuse_to_merge():
    with pytest.raises(SketchDescriptorMismatchError, match="the other has none"):
        summarize(torch.ones(3), histogram=True).merge(summarize(torch.ones(3)))
