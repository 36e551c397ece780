"""What the record costs: time to append, bytes a row, files, and time to read one series, on a synthetic run.

The run has 500 sites with the statistics of normally distributed tensors and a histogram at every tenth step. *Cold*
opens the run with a new reader and the operating system's cache of its files dropped, as far as that is allowed; *warm*
asks the same reader again. Processor time of a commit is that of its thread; that of folding, all threads less that.

    python benchmarks/bench_history.py [--steps 2000] [--sites 500] [--directory DIR]

20 million rows: ``--steps 20000 --sites 1000 --only 'in groups'``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from machine import describe_machine

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from aggregator.catalogue import Catalogue, MergedStep
from aggregator.history import GroupCommit, HistoryWriter, open_history, verify
from aggregator.testing import make_packet, make_site
from telemetry.packet import Packet
from telemetry.summary import DEFAULT_DESCRIPTOR, summarize
from telemetry.summary.fields import FLOAT_FIELDS

HIST_EVERY = 10
MEASURED_SERIES = 9
KINDS = ("activation", "gradient", "parameter", "update", "activation_grad")


def synthetic_packets(num_steps: int, num_sites: int) -> Iterator[Packet]:
    """Yield packets whose floats and histogram counts are different in every row, as those of a real run are."""
    chance, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    names = [f"layers.{i // len(KINDS)}.mlp.weight" for i in range(num_sites)]
    sites = [make_site(name, KINDS[i % len(KINDS)]) for i, name in enumerate(names)]
    scales = torch.exp(torch.randn(num_sites, generator=generator))
    observed = {
        site: summarize(torch.randn(4096, generator=generator) * scale, histogram=True)
        for site, scale in zip(sites, scales, strict=True)
    }
    first = make_packet(0, observed)
    positive = [FLOAT_FIELDS.index(name) for name in ("absmax", "sum_sq", "sum_abs", "m2", "m4")]
    for step in range(num_steps):
        noise = chance.normal(1.0, 0.1, first.floats.shape)
        floats = first.floats * noise
        floats[:, positive] = np.abs(floats[:, positive])
        ints = first.ints.copy()
        ints[:, 3] += chance.integers(-60, 60, len(ints))
        counted = step % HIST_EVERY == 0
        counts = first.hist_counts + (first.hist_counts > 0) * chance.integers(0, 9, first.hist_counts.shape)
        yield replace(
            first,
            step=step,
            ints=ints,
            floats=floats,
            absmax_rank=chance.integers(0, 8, len(ints)).astype(np.int32),
            hist_sites=first.hist_sites if counted else first.hist_sites[:0],
            hist_counts=counts if counted else first.hist_counts[:0],
            definitions=first.definitions if step == 0 else (),
        )


def write(path: Path, num_steps: int, num_sites: int, group: GroupCommit | None) -> dict[str, float]:
    """Write the run and return milliseconds a step; with ``group``, steps are appended, else each is committed."""
    writer, catalogue = HistoryWriter.create(path, {}, DEFAULT_DESCRIPTOR, group=group), Catalogue()
    thread_s, wall_s, process_s = [], [], 0.0
    for packet in synthetic_packets(num_steps, num_sites):
        step = MergedStep.resolve(packet, catalogue)
        begun_process, begun_thread, begun = time.process_time(), time.thread_time(), time.perf_counter()
        if group is None:
            writer.commit(step)
        else:
            writer.append(step)
        wall_s.append(time.perf_counter() - begun)
        thread_s.append(time.thread_time() - begun_thread)
        process_s += time.process_time() - begun_process
    begun_process = time.process_time()
    writer.wait_folded(600)
    process_s += time.process_time() - begun_process
    writer.close()
    return {
        "cpu": 1e3 * statistics.mean(thread_s),
        "cpu_median": 1e3 * statistics.median(thread_s),
        "cpu_folding": 1e3 * process_s / num_steps - 1e3 * statistics.mean(thread_s),
        "wall_median": 1e3 * statistics.median(wall_s),
        "wall_p99": 1e3 * float(np.quantile(wall_s, 0.99)),
        "wall_total": sum(wall_s),
    }


def drop_cache(path: Path) -> None:
    """Ask the operating system to forget the contents of the files."""
    for file in (file for file in path.rglob("*") if file.is_file()):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def timed(work: Callable[[], object]) -> float:
    """Return milliseconds."""
    begun = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - begun)


def read(path: Path, num_steps: int) -> dict[str, float]:
    """Return median milliseconds of series, and once of a scan of two columns and of verify."""
    cold, warm = [], []
    for i in range(MEASURED_SERIES):
        drop_cache(path)
        begun = time.perf_counter()
        history = open_history(path)
        rows = history.series(f"layers.{7 * i}.mlp.weight", "gradient", "rms")
        cold.append(1e3 * (time.perf_counter() - begun))
        assert rows.num_rows == num_steps
        begun = time.perf_counter()
        history.series(f"layers.{7 * i + 1}.mlp.weight", "gradient", "rms")
        warm.append(1e3 * (time.perf_counter() - begun))
    return {
        "series_cold": statistics.median(cold),
        "series_warm": statistics.median(warm),
        "scan": timed(lambda: open_history(path).observations(columns=["step", "absmax"])),
        "verify": timed(lambda: verify(path)),
    }


def report(title: str, rows: dict[str, str]) -> None:
    """Print one table."""
    print(f"\n{title}\n")
    for name, value in rows.items():
        print(f"| {name} | {value} |")


def main() -> None:
    """Write one run by commits and one by groups, read the first, and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--sites", type=int, default=500)
    parser.add_argument("--group-steps", type=int, default=16)
    parser.add_argument("--only", choices=("each step", "in groups"), default=None)
    parser.add_argument("--directory", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(describe_machine())
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        for name, group in (("each step", None), ("in groups", GroupCommit(options.group_steps, busy_share=0.0))):
            if options.only not in (None, name):
                continue
            path = Path(folder) / name.replace(" ", "-")
            cost = write(path, options.steps, options.sites, group)
            files = [file for file in path.rglob("*") if file.is_file()]
            num_rows = options.steps * options.sites
            found = read(path, options.steps)
            report(
                f"{options.steps} steps × {options.sites} sites, committed {name}",
                {
                    "CPU a step, without folding": f"{cost['cpu']:.2f} ms mean, {cost['cpu_median']:.2f} ms median",
                    "CPU a step for folding": f"{cost['cpu_folding']:.2f} ms",
                    "wall a step": f"{cost['wall_median']:.1f} ms median, {cost['wall_p99']:.0f} ms 99th percentile",
                    "bytes a row": f"{sum(file.stat().st_size for file in files) / num_rows:.0f}",
                    "files": f"{len(files)}",
                    "one series, cold": f"{found['series_cold']:.0f} ms",
                    "one series, warm": f"{found['series_warm']:.0f} ms",
                    "scan of two columns": f"{found['scan']:.0f} ms",
                    "verify": f"{found['verify']:.0f} ms",
                    "newest index": f"{max(f.stat().st_size for f in path.rglob('index-*')) / 1024:.0f} KiB",
                },
            )


if __name__ == "__main__":
    main()
