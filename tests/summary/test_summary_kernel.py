"""The C kernel: its builds agree to the last bit, it folds like merge, and it serves threads and lists."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

import telemetry.summary
from telemetry.errors import ConfigurationError, DtypeUnsupportedError
from telemetry.summary import (
    DEFAULT_DESCRIPTOR,
    Histogram,
    TensorSummary,
    available_backends,
    backend_name,
    merge_packed,
    summarize,
    using_backend,
)
from telemetry.summary.backend import reduce_into, reduce_many_into
from telemetry.summary.dtypes import DTYPE_CODES, ITEM_SIZES
from telemetry.summary.fields import NUM_INTS, ROW_WORDS
from telemetry.summary.quantization import QUANTIZATION_WORDS, target_format
from tests.summary.summary_oracle import FLOATS, GRIDS, INTEGERS, assert_counts_equal, elements

BUILDS = [name for name in available_backends() if name != "aten"]
needs_kernel = pytest.mark.skipif(not BUILDS, reason="the C kernel was not built here")


def nasty(size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    tensor = torch.randn(size, generator=generator, dtype=torch.float64) ** 9
    tensor[::5] = 0.0
    if dtype.is_floating_point:
        tensor[::31] = torch.nan
        tensor[1::37] = torch.inf
        return tensor.to(dtype)
    return tensor.abs().clamp(max=120).to(torch.int32).to(dtype)


def packed(tensor: torch.Tensor, **kwargs: object) -> tuple[list[int], ...]:
    row = torch.empty(ROW_WORDS, dtype=torch.int64)
    counts = torch.zeros(DEFAULT_DESCRIPTOR.num_counts, dtype=torch.int64)
    lost = torch.empty(QUANTIZATION_WORDS, dtype=torch.int64)
    reduce_into(
        tensor,
        row,
        counts=counts,
        descriptor=DEFAULT_DESCRIPTOR,
        quantization=lost,
        target=target_format("float8_e5m2"),
        **kwargs,
    )
    return row.tolist(), counts.tolist(), lost.tolist()


@needs_kernel
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.float8_e4m3fn], ids=str)
def test_all_builds_agree_on_every_bit_of_integers_and_floats(dtype):
    for size in (0, 1, 5, 8, 13, 600, 1024, 1031, 9999):
        tensor, results = nasty(size, dtype), []
        for name in BUILDS:
            with using_backend(name):
                results.append(packed(tensor))
        assert all(result == results[0] for result in results), size


@needs_kernel
def test_all_builds_agree_under_a_mask():
    tensor, results = nasty(5000, torch.float32), []
    for name in BUILDS:
        with using_backend(name):
            results.append(packed(tensor, mask=torch.arange(5000) % 3 != 1))
    assert all(result == results[0] for result in results)


def test_accumulating_is_bit_for_bit_a_merge_of_the_two_rows(backend):
    rows = [torch.empty(ROW_WORDS, dtype=torch.int64) for _ in range(3)]
    parts = [nasty(size, torch.float32) + size for size in (1000, 1, 2500)]
    for part, row in zip(parts, rows, strict=True):
        reduce_into(part, row)
    folded = rows[0].clone()
    for part in parts[1:]:
        reduce_into(part, folded, accumulate=True)
    halves = [(row.numpy()[:NUM_INTS], row.view(torch.float64).numpy()[NUM_INTS:]) for row in rows]
    ints, floats = merge_packed(merge_packed(halves[0], halves[1]), halves[2])
    np.testing.assert_array_equal(folded.numpy()[:NUM_INTS], ints)
    np.testing.assert_array_equal(folded.view(torch.float64).numpy()[NUM_INTS:], floats)


def test_accumulating_into_the_identity_gives_the_row_itself(backend):
    row = TensorSummary.empty()
    words = torch.from_numpy(np.concatenate((row._ints, row._floats.view(np.int64))))
    fresh = torch.empty(ROW_WORDS, dtype=torch.int64)
    for tensor in (nasty(100, torch.float32), torch.empty(0)):
        folded = words.clone()
        reduce_into(tensor, folded, accumulate=True)
        reduce_into(tensor, fresh)
        assert folded.tolist() == fresh.tolist()


def test_overwriting_leaves_nothing_of_what_was_there_and_counts_are_added_to(backend):
    row = torch.full((ROW_WORDS,), -1, dtype=torch.int64)
    counts = torch.full((DEFAULT_DESCRIPTOR.num_counts,), 5, dtype=torch.int64)
    reduce_into(torch.ones(3), row, counts=counts, descriptor=DEFAULT_DESCRIPTOR)
    assert row[0] == 3
    assert counts.sum() == 5 * DEFAULT_DESCRIPTOR.num_counts + 3


def many() -> list[torch.Tensor]:
    shapes = [(3, 4), (), (0,), (1000,), (7, 5, 3)]
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.float64, torch.bool]
    tensors = [torch.rand(shape).mul(9).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    return [*tensors, torch.rand(6, 8).t(), torch.rand(6, 8)[:, ::2], torch.rand(4).expand(3, 4)]


def test_a_list_of_tensors_gives_the_rows_of_single_calls(backend):
    tensors, single = many(), torch.empty(ROW_WORDS, dtype=torch.int64)
    rows = torch.empty(len(tensors), ROW_WORDS, dtype=torch.int64)
    counts = torch.zeros(3, DEFAULT_DESCRIPTOR.num_counts, dtype=torch.int64)
    index = [0, -1, 1, 2, -1, 0, 2, -1]
    for accumulate, calls in ((False, 1), (True, 2)):
        reduce_many_into(
            tensors,
            rows,
            counts=counts,
            counts_index=index,
            descriptor=DEFAULT_DESCRIPTOR,
            accumulate=accumulate,
        )
        assert rows[:, 7].tolist() == [calls] * len(tensors)
        if not accumulate:
            for tensor, row in zip(tensors, rows, strict=True):
                reduce_into(tensor, single)
                assert row.tolist() == single.tolist()
    assert counts.sum(1).tolist() == [2 * (12 + 48), 0, 2 * (1000 + 24)]


def test_a_complex_tensor_in_a_list_is_refused_before_anything_is_written(backend):
    rows = torch.full((2, ROW_WORDS), 7, dtype=torch.int64)
    with pytest.raises(DtypeUnsupportedError):
        reduce_many_into([torch.ones(2), torch.ones(2, dtype=torch.complex64)], rows)
    assert (rows == 7).all()


def test_every_width_of_histogram_table_counts_alike(backend):
    tensor = nasty(20_000, torch.float32)
    for grid in GRIDS:
        parts = [summarize(part, histogram=grid).histogram.counts for part in tensor.split(300)]
        whole = summarize(tensor, histogram=grid).histogram
        assert Histogram(grid, np.sum(parts, axis=0)) == whole


@needs_kernel
def test_threads_reduce_side_by_side_without_a_trace_of_each_other():
    tensors = [torch.randn(200_000, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    expected = [summarize(tensor, histogram=True) for tensor in tensors]
    results: list[TensorSummary | None] = [None] * 4

    def work(index: int) -> None:
        for _ in range(20):
            results[index] = summarize(tensors[index], histogram=True)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == expected


def ticks_inside_of_a_reduction(tensor: torch.Tensor, duration_s: float) -> int:
    """How often another thread ran in the first half of a reduction.

    Its beginning is left out, because a thread that has just got the interpreter's lock keeps it for 5 ms.
    """
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    started = time.perf_counter()
    reduce_into(tensor, torch.empty(ROW_WORDS, dtype=torch.int64))
    done.set()
    thread.join(timeout=60)
    return sum(started + 0.1 * duration_s < at < started + 0.5 * duration_s for at in ticks)


@needs_kernel
def test_a_large_reduction_lets_other_threads_run():
    tensor, row = torch.ones(1 << 27, dtype=torch.int8), torch.empty(ROW_WORDS, dtype=torch.int64)
    durations = []
    for _ in range(3):
        started = time.perf_counter()
        reduce_into(tensor, row)
        durations.append(time.perf_counter() - started)
    assert any(ticks_inside_of_a_reduction(tensor, min(durations)) for _ in range(3))


def test_the_backend_has_a_name_for_the_plan_and_a_choice_is_undone():
    assert backend_name("cpu") == available_backends()[0]
    assert backend_name(torch.device("cuda", 0)) == "aten"
    with using_backend("aten"):
        assert backend_name("cpu") == "aten"
    assert backend_name("cpu") == available_backends()[0]
    with pytest.raises(ConfigurationError, match=r"c-magic.*aten"), using_backend("c-magic"):
        pass


def test_buffers_on_another_device_raise_and_are_not_written_through(backend):
    row, away = torch.empty(ROW_WORDS, dtype=torch.int64), torch.empty(ROW_WORDS, dtype=torch.int64, device="meta")
    with pytest.raises((RuntimeError, NotImplementedError)):
        reduce_into(torch.ones(3), row, mask=torch.ones(3, dtype=torch.bool, device="meta"))
    with pytest.raises((RuntimeError, NotImplementedError)):
        reduce_into(torch.ones(3), away, accumulate=True)


@needs_kernel
def test_the_kernel_refuses_arguments_that_make_no_sense():
    from telemetry.summary import _kernel

    row = torch.empty(ROW_WORDS, dtype=torch.int64).data_ptr()
    with pytest.raises(TypeError, match="15 are taken"):
        _kernel.reduce(0)
    with pytest.raises(ValueError, match="dtype code 99"):
        _kernel.reduce(0, 99, 0, 0, 0, row, 0, 0, 0, 0, 0, 0, 0, 0, 0.0)
    with pytest.raises(ValueError, match="no usable grid"):
        _kernel.reduce(0, 1, 0, 0, 0, row, 0, row, 3, -48, 16, 0, 0, 0, 0.0)
    with pytest.raises(ValueError, match="differ in length"):
        _kernel.reduce_many(0, row, 0, 0, 0, 0, 0, [1], [], [], [])


def test_every_floating_and_integer_dtype_of_torch_has_a_code_and_packed_ones_have_none():
    known = {d for d in vars(torch).values() if isinstance(d, torch.dtype) and not d.is_complex}
    unknown = {str(d).removeprefix("torch.") for d in known - set(DTYPE_CODES)}
    assert not {name for name in unknown if not name.startswith(("q", "float4", "bits", "int", "uint"))}
    assert not {"int64", "uint8", "uint64"} & unknown
    assert all(ITEM_SIZES[code] == dtype.itemsize for dtype, code in DTYPE_CODES.items())


def test_a_dtensor_is_its_local_shard(backend):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (4,))
        local = torch.arange(6.0).reshape(2, 3)
        tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        mask = DTensor.from_local(local > 1, mesh, [Shard(0)], run_check=False)
        assert_counts_equal(summarize(tensor, histogram=True), elements(local))
        assert summarize(tensor, mask=mask).total == 4
        empty = DTensor.from_local(torch.empty(0, 3), mesh, [Shard(0)], run_check=False)
        assert summarize(empty).total == 0
    finally:
        dist.destroy_process_group()


def test_the_public_names_of_the_summary_are_these():
    assert set(telemetry.summary.__all__) == {
        *("DEFAULT_DESCRIPTOR", "DERIVED_FIELDS", "FLOAT_FIELDS", "INT_FIELDS", "SUMMARY_FIELDS", "TARGETS"),
        *("Histogram", "HistogramDescriptor", "Quantile", "QuantizationLoss", "TensorSummary"),
        *("RunningHistogram", "RunningStats", "summarize", "derive", "identity", "merge_packed"),
        *("available_backends", "backend_name", "using_backend"),
    }
    assert all(hasattr(telemetry.summary, name) for name in telemetry.summary.__all__)
