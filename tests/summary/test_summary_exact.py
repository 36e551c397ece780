"""Integers, extremes and bins are those of the oracle, to the last count, on every backend and dtype."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from telemetry.summary import HistogramDescriptor, available_backends, summarize, using_backend
from telemetry.summary.reference import reference_counts, reference_row
from tests.summary.summary_oracle import (
    FLOAT8,
    FLOATS,
    GRIDS,
    INTEGERS,
    WIDEST_GRID,
    assert_counts_equal,
    assert_floats_close,
    elements,
    every_pattern,
)


@pytest.mark.parametrize("grid", [*GRIDS, WIDEST_GRID], ids=lambda grid: f"b{grid.bins_per_octave}{grid.lo_exp}")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, *FLOAT8], ids=str)
def test_every_bit_pattern_of_a_narrow_float_is_counted_where_the_oracle_counts_it(dtype, grid):
    tensor = every_pattern(dtype)
    for name in available_backends():
        with using_backend(name):
            assert_counts_equal(summarize(tensor, histogram=grid), elements(tensor))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, *FLOAT8], ids=str)
def test_the_floats_over_every_bit_pattern_are_those_of_the_oracle(backend, dtype):
    tensor = every_pattern(dtype)
    assert_floats_close(summarize(tensor), elements(tensor))


def around_every_edge(grid: HistogramDescriptor, dtype: np.dtype) -> Tensor:
    edges = grid.edges().astype(dtype)
    near = [edges, np.nextafter(edges, dtype.type(0)), np.nextafter(edges, dtype.type(np.inf))]
    return torch.from_numpy(np.concatenate([*near, *(-part for part in near)]))


@pytest.mark.parametrize("grid", [*GRIDS, WIDEST_GRID], ids=lambda grid: f"b{grid.bins_per_octave}{grid.lo_exp}")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_edge_and_its_neighbours_an_ulp_away_fall_into_the_bin_of_the_oracle(backend, dtype, grid):
    tensor = around_every_edge(grid, np.dtype(dtype))
    assert_counts_equal(summarize(tensor, histogram=grid), elements(tensor))


def test_a_bin_holds_its_lower_edge_and_not_its_upper_one():
    for grid in GRIDS:
        edges = grid.edges()
        counts = reference_counts(edges[:-1], grid)
        assert counts[grid.zero_index + 2 :][: grid.bins_per_side].tolist() == [1] * grid.bins_per_side
        below = reference_counts(np.nextafter(edges[1:], 0), grid)
        assert below[grid.zero_index + 2 :][: grid.bins_per_side].tolist() == [1] * grid.bins_per_side


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_count_as_the_float64_nearest_to_them(backend, dtype):
    info = torch.iinfo(dtype)
    near = [info.min, info.min + 1, -(2**53) - 1, -3, -1, 0, 1, 2, 3, 100, 2**53 + 1, info.max - 1, info.max]
    fitting = [n for n in near if info.min <= n <= info.max]
    tensor = torch.from_numpy(np.array(fitting * 150, dtype=str(dtype).removeprefix("torch.")))
    summary = summarize(tensor, histogram=True)
    values = np.array([float(n) for n in fitting * 150])
    assert_counts_equal(summary, values)
    assert summary.sum == pytest.approx(float(values.sum()), rel=1e-12, abs=1e-300)


def test_bool_counts_as_zero_and_one(backend):
    summary = summarize(torch.tensor([True, False, True]), histogram=True)
    assert (summary.total, summary.zero, summary.sum, summary.max) == (3, 1, 2.0, 1.0)
    assert_counts_equal(summary, np.array([1.0, 0.0, 1.0]))


SUBNORMALS = {
    torch.float64: (torch.int64, [1, 2, (1 << 52) - 1, 1 << 52]),
    torch.float32: (torch.int32, [1, 2, (1 << 23) - 1, 1 << 23]),
    torch.float16: (torch.int16, [1, 2, (1 << 10) - 1, 1 << 10]),
    torch.bfloat16: (torch.int16, [1, 2, (1 << 7) - 1, 1 << 7]),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_subnormals_are_not_zeros_under_flush_denormal(backend, dtype, flushed_denormals):
    ints, patterns = SUBNORMALS[dtype]
    tensor = torch.tensor([*patterns, 0] * 5, dtype=ints).view(dtype)
    tensor = torch.cat((tensor, (tensor.view(ints) | torch.iinfo(ints).min).view(dtype)))
    summary = summarize(tensor, histogram=WIDEST_GRID)
    torch.set_flush_denormal(False)
    expected, _ = reference_row(elements(tensor))
    assert [summary.total, summary.finite, summary.zero, summary.negative] == expected[:4].tolist()
    np.testing.assert_array_equal(summary.histogram.counts, reference_counts(elements(tensor), WIDEST_GRID))
    if dtype is not torch.float64 or backend != "aten":
        # ATen adds float64 subnormals as the processor is told to; no count depends on it.
        assert_counts_equal(summary, elements(tensor))


def test_the_kernel_leaves_the_flush_denormal_mode_as_it_was(backend, flushed_denormals):
    summarize(torch.ones(100))
    assert (torch.tensor([1e-40]) * 1.0).item() == 0.0


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 511, 512, 1023, 1024, 1025, 4095, 4097, 70001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_every_size_around_a_block_or_table_border_is_right(backend, dtype, size):
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    tensor[::7], tensor[3::11], tensor[5::97] = 0.0, -0.0, torch.inf
    tensor = (tensor**5).to(dtype)
    summary = summarize(tensor, histogram=True)
    assert_counts_equal(summary, elements(tensor))
    assert_floats_close(summary, elements(tensor))


@st.composite
def strided_tensors(draw: st.DrawFn) -> Tensor:
    """A view: permuted, sliced, expanded, transposed, of a tensor with special values strewn in."""
    shape = draw(st.lists(st.integers(1, 7), min_size=0, max_size=4))
    dtype = draw(st.sampled_from([*FLOATS, torch.int32, torch.int8, torch.bool, torch.float8_e5m2]))
    seed = draw(st.integers(0, 2**31))
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 4
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, 3e38], dtype=torch.float64)
    if dtype.is_floating_point:
        where = torch.rand(shape, generator=torch.Generator().manual_seed(seed + 1)) < 0.2
        choice = torch.randint(0, 7, shape, generator=torch.Generator().manual_seed(seed + 2))
        tensor = torch.where(where, special[choice], tensor)
    tensor = tensor.to(torch.float32).to(dtype)
    for axis in range(tensor.dim()):
        tensor = tensor.narrow(axis, 0, draw(st.integers(1, tensor.shape[axis])))
    if tensor.dim() and draw(st.booleans()):
        tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    if draw(st.booleans()):
        tensor = tensor[None].expand(draw(st.integers(1, 4)), *tensor.shape)
    return tensor


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(strided_tensors(), st.sampled_from(GRIDS))
def test_any_view_has_the_summary_of_its_elements_on_every_backend(tensor, grid):
    values = elements(tensor)
    for name in available_backends():
        with using_backend(name):
            assert_counts_equal(summarize(tensor, histogram=grid), values)


@settings(max_examples=60, deadline=None)
@given(strided_tensors(), st.data())
def test_any_split_merges_to_the_integers_of_the_whole_across_backends(tensor, data):
    flat = tensor.reshape(-1)
    cuts = sorted(data.draw(st.lists(st.integers(0, flat.numel()), max_size=4)))
    parts = []
    for part in torch.tensor_split(flat, cuts):
        with using_backend(data.draw(st.sampled_from(available_backends()))):
            parts.append(summarize(part, histogram=True))
    merged = parts[0]
    for part in parts[1:]:
        merged = merged.merge(part)
    whole = summarize(tensor, histogram=True)
    np.testing.assert_array_equal(merged._ints[:-1], whole._ints[:-1])
    assert merged.calls == len(parts)
    assert merged.histogram == whole.histogram
    assert (merged.min, merged.max, merged.absmax) == (whole.min, whole.max, whole.absmax) or not whole.finite


def test_views_that_torch_treats_apart_are_reduced_like_any_other(backend):
    base = torch.arange(24.0).reshape(2, 3, 4)
    cases = {
        "0-dim": torch.tensor(3.0),
        "empty": torch.empty(0, 3),
        "requires grad": base.clone().requires_grad_(),
        "part of a graph": base.clone().requires_grad_() * 2,
        "parameter": torch.nn.Parameter(base),
        "channels last": base[None].contiguous(memory_format=torch.channels_last),
        "every second": base[..., ::2],
        "negative bit": torch.view_as_complex(base.reshape(12, 2)).conj().imag,
        "misaligned": torch.frombuffer(bytearray(range(41)), dtype=torch.float32, offset=1),
    }
    with torch.inference_mode():
        cases["inference"] = base.clone() * 2
    for tensor in cases.values():
        assert_counts_equal(summarize(tensor, histogram=True), elements(tensor.clone()))
    assert cases["requires grad"].grad is None


def test_a_subclass_without_its_own_dispatch_is_read_like_a_tensor(backend):
    class Named(torch.Tensor):
        pass

    assert summarize(torch.arange(4.0).as_subclass(Named)).sum == 6.0
