"""What a summary costs on a CPU: nanoseconds an element, beside the time that reading the memory takes.

    python benchmarks/bench_summary.py [--quick] [--seconds S]

Contenders take turns, so that a busy machine slows all of them alike. Tables of the medians and of the minima over all
turns; the minima say more of the code, the medians more of the machine. Contenders:

- read floor: a C loop that loads every byte and does nothing else (needs a C compiler).
- spine, spine + histogram: this package, with the backend that serves here.
- ATen spine: the same record put together from ATen operators in the tensor's own dtype, which is the fastest way and
  less exact than ours; ATen + histc adds torch.histc over 536 bins.
- var_mean, aminmax, histc: single ATen operators.

One thread: the CPU time of the calling thread, so that what else runs on the machine counts as little as it can. Two
threads: wall time; ours reduces two halves in two Python threads, ATen uses two threads of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path

import torch
from torch import Tensor

from machine import describe_machine
from telemetry.summary import DEFAULT_DESCRIPTOR, available_backends, using_backend
from telemetry.summary.backend import reduce_into, reduce_many_into
from telemetry.summary.fields import ROW_WORDS

Contender = Callable[[], object]
Measured = tuple[torch.dtype, int, int, dict[str, list[float]]]
SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)


def read_floor() -> Callable[[Tensor], int] | None:
    if shutil.which("cc") is None:
        return None
    library = Path(tempfile.mkdtemp()) / "read_floor.so"
    source = Path(__file__).with_name("read_floor.c")
    subprocess.run(["cc", "-O3", "-march=native", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    function = ctypes.CDLL(str(library)).read_floor
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_uint64
    return lambda tensor: function(tensor.data_ptr(), tensor.nbytes)


def take_turns(contenders: dict[str, Contender], args: argparse.Namespace, inner: int) -> dict[str, list[float]]:
    """Return the seconds a call of every turn; each turn times ``inner`` calls of every contender."""
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for contender in contenders.values():
        contender()
    end = time.perf_counter() + args.seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for name, contender in contenders.items():
            start = clock()
            for _ in range(inner):
                contender()
            times[name].append((clock() - start) / inner)
    return times


def aten_spine(x: Tensor) -> None:
    """Put the record together from ATen operators, in the tensor's own dtype."""
    _ = torch.aminmax(x), x.sum(), torch.linalg.vector_norm(x, 1), torch.linalg.vector_norm(x, 2)
    _ = (x == 0).sum(), (x < 0).sum(), torch.isnan(x).sum(), torch.isposinf(x).sum(), torch.isneginf(x).sum()
    d = x - x.mean()
    square = d * d
    _ = square.sum(), (square * d).sum(), (square * square).sum()


def histc(x: Tensor) -> Tensor:
    return torch.histc(x.float(), bins=DEFAULT_DESCRIPTOR.num_counts, min=-4.0, max=4.0)


def in_both_threads(pool: ThreadPoolExecutor, work: Callable[[int], None]) -> Contender:
    # The choice of a backend belongs to a context, and threads do not inherit one.
    contexts = [copy_context(), copy_context()]
    return lambda: list(pool.map(lambda i: contexts[i].run(work, i), range(2)))


def summary_contenders(x: Tensor, pool: ThreadPoolExecutor | None) -> dict[str, Contender]:
    parts = [x] if pool is None else list(x.chunk(2))
    rows = torch.empty(len(parts), ROW_WORDS, dtype=torch.int64)
    counts = torch.zeros(len(parts), DEFAULT_DESCRIPTOR.num_counts, dtype=torch.int64)

    def spine(i: int) -> None:
        reduce_into(parts[i], rows[i])

    def with_histogram(i: int) -> None:
        reduce_into(parts[i], rows[i], counts=counts[i], descriptor=DEFAULT_DESCRIPTOR)

    def over_parts(work: Callable[[int], None]) -> Contender:
        return (lambda: work(0)) if pool is None else in_both_threads(pool, work)

    return {"spine": over_parts(spine), "spine + histogram": over_parts(with_histogram)}


COLUMNS = ("read floor", "spine", "spine + histogram", "ATen spine", "ATen + histc", "var_mean", "aminmax", "histc")
RATIOS = (
    ("spine / floor", "spine", "read floor"),
    ("with histogram", "spine + histogram", "read floor"),
    ("ATen / spine", "ATen spine", "spine"),
    ("with histogram", "ATen + histc", "spine + histogram"),
)
HEADER = ("dtype", "elements", "threads", *COLUMNS, *(name for name, _, _ in RATIOS))


def one_tensor(
    dtype: torch.dtype, numel: int, floor: Callable[[Tensor], int] | None, args: argparse.Namespace
) -> dict[str, list[float]]:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    contenders: dict[str, Contender] = {} if floor is None else {"read floor": lambda: floor(x)}
    contenders |= summary_contenders(x, args.pool)
    contenders |= {
        "ATen spine": lambda: aten_spine(x),
        "ATen + histc": lambda: (aten_spine(x), histc(x)),
        "var_mean": lambda: torch.var_mean(x),
        "aminmax": lambda: torch.aminmax(x),
        "histc": lambda: histc(x),
    }
    return take_turns(contenders, args, inner=max(1, (256 << 10) // numel))


def row(label: str, numel: int, times: dict[str, float]) -> str:
    cells = [f"{times[name] / numel * 1e9:.3f}" if name in times else "" for name in COLUMNS]
    ratios = [f"{times[a] / times[b]:.1f}×" if a in times and b in times else "" for _, a, b in RATIOS]
    return f"| {label} | {' | '.join(cells + ratios)} |"


def gpt_parameters() -> list[Tensor]:
    """Return the 148 parameter tensors of a GPT of 26 million parameters: 12 layers of width 384."""
    d, vocabulary, context = 384, 12_288, 512
    layer = [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,), (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    shapes = [(vocabulary, d), (context, d), *layer * 12, (d,), (d,)]
    return [torch.randn(shape) * 0.02 for shape in shapes]


def whole_model(args: argparse.Namespace) -> dict[str, list[float]]:
    tensors = gpt_parameters()
    halves = [tensors[0:1] + tensors[2::2], tensors[1::2]] if args.pool else [tensors]
    rows = [torch.empty(len(half), ROW_WORDS, dtype=torch.int64) for half in halves]
    counts = [torch.zeros(len(half), DEFAULT_DESCRIPTOR.num_counts, dtype=torch.int64) for half in halves]

    def spine(i: int) -> None:
        reduce_many_into(halves[i], rows[i])

    def with_histogram(i: int) -> None:
        reduce_many_into(halves[i], rows[i], counts=counts[i], descriptor=DEFAULT_DESCRIPTOR)

    def over(work: Callable[[int], None]) -> Contender:
        return in_both_threads(args.pool, work) if args.pool else (lambda: work(0))

    ours: dict[str, Contender] = {
        "one call, spine": over(spine),
        "one call, spine + histogram": over(with_histogram),
        "_foreach_norm(2)": lambda: torch._foreach_norm(tensors, 2),
    }
    loops: dict[str, Contender] = {
        "ATen loop, spine": lambda: [aten_spine(x) for x in tensors],
        "ATen loop, spine + histc": lambda: [(aten_spine(x), histc(x)) for x in tensors],
    }
    # Apart, because in the time of one loop the others have dozens of turns.
    return take_turns(ours, args, inner=1) | take_turns(loops, args, inner=1)


def model_rows(threads: int, times: dict[str, float]) -> list[str]:
    norm = times["_foreach_norm(2)"]
    return [f"| {name} | {threads} | {taken * 1e3:.1f} | {taken / norm:.2f}× |" for name, taken in times.items()]


def measure(floor: Callable[[Tensor], int] | None, args: argparse.Namespace) -> tuple[list[Measured], list[Measured]]:
    tensors: list[Measured] = []
    models: list[Measured] = []
    for threads in (1,) if args.quick else (1, 2):
        args.threads = threads
        torch.set_num_threads(threads)
        args.pool = ThreadPoolExecutor(2) if threads == 2 else None
        # Below a million elements the hand-over to a thread costs more than it brings.
        sizes = SIZES if threads == 1 else SIZES[2:]
        tensors += [
            (dtype, numel, threads, one_tensor(dtype, numel, floor, args))
            for dtype in (torch.float32, torch.bfloat16)
            for numel in ((1 << 20,) if args.quick else sizes)
        ]
        models.append((torch.float32, 0, threads, whole_model(args)))
    return tensors, models


def report(backend: str, statistic: str, tensors: list[Measured], models: list[Measured]) -> None:
    reduce = {"median": statistics.median, "minimum": min}[statistic]
    print(f"\nBackend {backend}, nanoseconds an element, {statistic} of all turns\n")
    print(f"| {' | '.join(HEADER)} |\n|{' --- |' * len(HEADER)}")
    for dtype, numel, threads, times in tensors:
        label = f"{str(dtype).removeprefix('torch.')} | {numel:,} | {threads}"
        print(row(label, numel, {name: reduce(taken) for name, taken in times.items()}))
    print("\n| 148 tensors, 26 M float32 | threads | ms | of _foreach_norm(2) |\n| --- | --- | --- | --- |")
    for _, _, threads, times in models:
        print("\n".join(model_rows(threads, {name: reduce(taken) for name, taken in times.items()})))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="how long the contenders of one row take turns")
    parser.add_argument("--quick", action="store_true", help="one size and one thread")
    parser.add_argument("--backends", nargs="*", help="backends to measure; left out, the one that serves here")
    args = parser.parse_args()
    floor = read_floor()
    print(describe_machine())
    for backend in args.backends or available_backends()[:1]:
        with using_backend(backend):
            tensors, models = measure(floor, args)
        for statistic in ("median", "minimum"):
            report(backend, statistic, tensors, models)


if __name__ == "__main__":
    main()
