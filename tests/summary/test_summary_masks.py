"""Masks leave elements out, weights repeat them, and neither makes the host wait."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from telemetry.errors import DtypeUnsupportedError, MaskShapeError
from telemetry.summary import available_backends, summarize, using_backend
from telemetry.summary.backend import reduce_into
from telemetry.summary.fields import ROW_WORDS
from telemetry.summary.quantization import QUANTIZATION_WORDS, target_format
from tests.summary.summary_oracle import FLOATS, GRIDS, INTEGERS, assert_counts_equal, assert_floats_close, elements


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool], ids=str)
def test_only_elements_under_a_true_mask_count(backend, dtype):
    generator = torch.Generator().manual_seed(2)
    tensor = (torch.randn(5000, generator=generator) * 9).abs().to(torch.int32).to(dtype)
    mask = torch.rand(5000, generator=generator) < 0.4
    values = elements(tensor)[mask.numpy()]
    summary = summarize(tensor, mask=mask, histogram=True)
    assert_counts_equal(summary, values)
    assert_floats_close(summary, values)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.integers(0, 2**31),
    st.data(),
)
def test_a_mask_follows_its_elements_through_any_view(shape, seed, data):
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(shape, generator=generator) ** 3
    tensor[torch.rand(shape, generator=generator) < 0.2] = torch.nan
    order = data.draw(st.permutations(range(len(shape))))
    tensor = tensor.permute(order)
    mask_shape = [size if data.draw(st.booleans()) else 1 for size in tensor.shape]
    mask = torch.rand(mask_shape, generator=generator) < 0.5
    values = elements(tensor[mask.expand(tensor.shape)])
    for name in available_backends():
        with using_backend(name):
            assert_counts_equal(summarize(tensor, mask=mask, histogram=True), values)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(width=32), st.integers(0, 300)), max_size=30), st.sampled_from(GRIDS))
def test_a_weight_counts_an_element_as_often_as_repeating_it_would(pairs, grid):
    tensor = torch.tensor([value for value, _ in pairs], dtype=torch.float32)
    weights = torch.tensor([weight for _, weight in pairs], dtype=torch.int16)
    repeated = tensor.repeat_interleave(weights.to(torch.int64))
    summary = summarize(tensor, weights=weights, histogram=grid)
    assert_counts_equal(summary, elements(repeated))


def test_the_moments_of_weighted_elements_are_those_of_repeated_ones(backend):
    generator = torch.Generator().manual_seed(4)
    tensor = torch.randn(2000, generator=generator) + 50
    weights = torch.randint(0, 5, (2000,), generator=generator)
    assert_floats_close(summarize(tensor, weights=weights), elements(tensor.repeat_interleave(weights)))


def test_a_mask_that_hides_everything_leaves_an_empty_call(backend):
    summary = summarize(torch.ones(4, 4), mask=torch.zeros(4, 1, dtype=torch.bool), histogram=True)
    assert (summary.total, summary.finite, summary.calls) == (0, 0, 1)
    assert summary.histogram.total == 0


def test_the_mask_of_a_quantization_hides_its_losses_too(backend):
    tensor, mask = torch.tensor([1e-9, 1e9, 1.0]), torch.tensor([False, True, True])
    lost = summarize(tensor, mask=mask, target="float8_e4m3fn").quantization
    assert (lost.finite, lost.underflow, lost.overflow) == (2, 0, 1)


# Operators that read a device value back, or whose output size depends on one.
WAITING = {"_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "is_nonzero", "equal", "_to_copy_cpu"}


class RefuseWaiting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.seen.append(name)
        assert name not in WAITING, f"{func} makes the host wait"
        assert not (name == "index" and any(i is not None and i.dtype is torch.bool for i in args[1])), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["none", "mask", "weights"])
def test_nothing_on_the_way_of_a_masked_reduction_reads_a_device_value(kind):
    tensor = torch.randn(100, 70)
    weight = {"none": None, "mask": tensor > 0, "weights": (tensor > 0).to(torch.int64)}[kind]
    row = torch.zeros(ROW_WORDS, dtype=torch.int64)
    counts = torch.zeros(GRIDS[2].num_counts, dtype=torch.int64)
    lost = torch.zeros(QUANTIZATION_WORDS, dtype=torch.int64)
    with using_backend("aten"), RefuseWaiting() as mode:
        for accumulate in (False, True):
            reduce_into(
                tensor,
                row,
                mask=weight,
                counts=counts,
                descriptor=GRIDS[2],
                quantization=lost,
                target=target_format("float16"),
                accumulate=accumulate,
            )
    assert "scatter_add_" in mode.seen


def test_the_guard_of_the_test_above_does_catch_a_read():
    with RefuseWaiting(), pytest.raises(AssertionError, match="makes the host wait"):
        torch.ones(1).item()


def test_a_mask_of_another_shape_is_refused_with_both_shapes(backend):
    with pytest.raises(MaskShapeError, match=r"\[3, 4\].*\[4, 3\]"):
        summarize(torch.ones(4, 3), mask=torch.ones(3, 4, dtype=torch.bool))
    with pytest.raises(MaskShapeError, match=r"mask\[\.\.\., None\]"):
        summarize(torch.ones(4, 3), mask=torch.ones(4, dtype=torch.bool))


def test_a_mask_that_is_not_bool_and_weights_that_are_not_integers_are_refused(backend):
    with pytest.raises(DtypeUnsupportedError, match=r"torch\.int64.*torch\.bool is accepted"):
        summarize(torch.ones(4), mask=torch.ones(4, dtype=torch.int64))
    with pytest.raises(DtypeUnsupportedError, match=r"torch\.float32.*integer dtypes are accepted"):
        summarize(torch.ones(4), weights=torch.ones(4))
    with pytest.raises(MaskShapeError, match="both"):
        summarize(torch.ones(4), mask=torch.ones(4, dtype=torch.bool), weights=torch.ones(4, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_a_complex_tensor_is_refused_and_told_what_is_accepted(backend, dtype):
    with pytest.raises(DtypeUnsupportedError, match=r"complex.*float32.*int64") as caught:
        summarize(torch.ones(3, dtype=dtype))
    assert "absolute value" in caught.value.remedy
    assert caught.value.code == "stat_dtype_unsupported"
    assert isinstance(caught.value, TypeError)


def test_a_quantized_tensor_is_refused(backend):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    with pytest.raises(DtypeUnsupportedError, match="quint8"):
        summarize(quantized)


def test_a_mask_costs_no_accuracy(backend):
    tensor = torch.cat((torch.full((5000,), np.nan), 1e6 + torch.randn(5000, dtype=torch.float64)))
    mask = torch.arange(10_000) >= 5000
    assert_floats_close(summarize(tensor, mask=mask), elements(tensor[5000:]))
