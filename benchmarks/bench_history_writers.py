"""Our history beside the writers that TorchLens and torchinstruments bring along, on the same numbers.

Each gets what ``bench_history.py`` makes: sites with the statistics of normally distributed tensors, and a histogram at
every tenth step where the format has histograms. Each step is committed so that the writer's own reader sees it, as
their own collectors do it:

- TorchLens: ``HistoryWriter.append_block``, one ``.npz`` a step and a JSON index of all steps; read by its
  ``HistoryReader``.
- torchinstruments: ``ParquetHistory.append`` for each statistic of each site, then ``publish``, which rewrites one
  Parquet file; it has no histograms, and no reader of a series: its documentation scans the file with Polars.

Both are internal in part: a version that has moved them shows as not installed. TorchLens syncs its files but not their
folder, torchinstruments syncs nothing, so a step of theirs need not survive the loss of the machine.

    python benchmarks/bench_history_writers.py [--steps 200] [--sites 500] [--directory DIR]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch

from bench_history import drop_cache, synthetic_packets
from machine import describe_machine

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from aggregator.catalogue import Catalogue, MergedStep
from aggregator.history import HistoryWriter, open_history
from telemetry.packet import Packet
from telemetry.summary import DEFAULT_DESCRIPTOR
from telemetry.summary.fields import FLOAT_FIELDS, INT_FIELDS

MEASURED_SERIES = 5
# Steps at the beginning and at the end of which the cost is shown: one that grows with the run is no cost of a step.
WINDOW = 20

Commit = Callable[[Packet], None]


class Subject(Protocol):
    """One writer with its reader."""

    def start(self, path: Path, first: Packet) -> Commit:
        """Begin a run; ``first`` has the definitions of all sites. Returns what commits a step."""
        ...

    def finish(self) -> None:
        """Close the run."""
        ...

    def series(self, path: Path, number: int) -> int:
        """Open the run anew, read the mean of one site over all steps, and return how many there are."""
        ...


class Rankfold:
    """This repository."""

    def start(self, path: Path, first: Packet) -> Commit:
        self._writer, catalogue = HistoryWriter.create(path, {}, DEFAULT_DESCRIPTOR), Catalogue()
        self._names = [(site.name, site.kind) for site in first.definitions]
        return lambda packet: self._writer.commit(MergedStep.resolve(packet, catalogue))

    def finish(self) -> None:
        self._writer.close()

    def series(self, path: Path, number: int) -> int:
        return int(open_history(path).series(*self._names[number], "mean").num_rows)


class TorchLens:
    """TorchLens's observability artifact."""

    def __init__(self) -> None:
        from torchlens.observability import _artifact, _kernels, _schema

        self._artifact, self._kernels, self._schema = _artifact, _kernels, _schema

    def start(self, path: Path, first: Packet) -> Commit:
        self._writer = self._artifact.HistoryWriter(path, self._schema.RunRecord("run", "segment"))
        self._names = [f"{site.kind}:{site.name}" for site in first.definitions]
        self._kinds = [site.kind for site in first.definitions]
        for name, site in zip(self._names, first.definitions, strict=True):
            self._writer.add_site(self._schema.SiteRecord(name, "param", site.name))
        return self._commit

    def _commit(self, packet: Packet) -> None:
        block = self._schema.StepBlockRecord("segment", packet.step, "explicit")
        observations = tuple(self._observations(packet))
        self._writer.append_block(self._artifact.CommittedBlock(block, observations, packet.step, packet.step))

    def _observations(self, packet: Packet) -> Iterator[Any]:
        streams = {"parameter": "param", "gradient": "param_grad", "update": "param_delta"}
        counted = {site: i for i, site in enumerate(packet.hist_sites.tolist())}
        bins = self._kernels.HistogramDescriptor().bins_per_side
        keys = ("zero", "pos_underflow", "neg_underflow", "pos_overflow", "neg_overflow", "nan", "posinf", "neginf")
        for row, site in enumerate(packet.sites.tolist()):
            ints = dict(zip(INT_FIELDS, packet.ints[row].tolist(), strict=True))
            floats = dict(zip(FLOAT_FIELDS, packet.floats[row].tolist(), strict=True))
            names = ("total", "finite", "zero", "negative", "nan", "pos_inf", "neg_inf")
            numbers = ("min", "max", "absmax", "sum", "sum_sq", "sum_abs", "mean", "m2")
            spine = self._kernels.SpineResult(
                *(ints[name] for name in names), *(floats[name] for name in numbers), "float64"
            )
            sketch = None
            if site in counted:
                counts = packet.hist_counts[counted[site]].tolist()
                specials = dict(zip(keys, counts[2 * bins :], strict=True))
                sketch = self._kernels.HistogramResult(
                    self._kernels.HistogramDescriptor(), counts[bins : 2 * bins], counts[:bins], specials
                )
            kind = self._kinds[row]
            yield self._schema.ObservationRecord(
                packet.step,
                self._names[row],
                streams.get(kind, kind),
                "step",
                "observed",
                spine,
                sketch,
                "unscaled" if "grad" in kind else None,
            )

    def finish(self) -> None:
        """Nothing is left open."""

    def series(self, path: Path, number: int) -> int:
        rows = self._artifact.HistoryReader(path).observations(site_id=self._names[number])
        return len([row.spine.mean for row in rows])


class Torchinstruments:
    """torchinstruments' Parquet history."""

    def __init__(self) -> None:
        import polars as pl
        from torchinstruments.history.parquet import ParquetHistory
        from torchinstruments.history.records import Observation, Signal
        from torchinstruments.history.summary import HistoryConfig
        from torchinstruments.records import ExecutionContext, ModuleMode

        self._pl, self._history, self._observation = pl, ParquetHistory, Observation
        self._signal, self._context = Signal.OUTPUT, ExecutionContext(ModuleMode.TRAIN, True)
        self._buffer_rows = HistoryConfig().buffer_rows

    def start(self, path: Path, first: Packet) -> Commit:
        path.mkdir()
        self._open = self._history(path / "history.parquet", buffer_rows=self._buffer_rows)
        self._open.initialize()
        self._names = [f"{site.kind}:{site.name}" for site in first.definitions]
        return self._commit

    def _commit(self, packet: Packet) -> None:
        now = datetime.now(timezone.utc)
        for row, name in enumerate(self._names):
            numbers = (*packet.ints[row].tolist(), *packet.floats[row].tolist())
            for metric, value in zip((*INT_FIELDS, *FLOAT_FIELDS), numbers, strict=True):
                self._open.append(
                    self._observation(
                        name,
                        0,
                        self._signal,
                        "",
                        packet.step,
                        packet.step,
                        now,
                        (4096,),
                        "float32",
                        metric,
                        float(value),
                        self._context,
                    )
                )
        self._open.publish()

    def finish(self) -> None:
        self._open.close()

    def series(self, path: Path, number: int) -> int:
        column = self._pl.col
        rows = self._pl.scan_parquet(path / "history.parquet").filter(
            (column("layer") == self._names[number]) & (column("metric") == "mean")
        )
        return int(rows.select("sample_id", "value").collect().height)


def measure(subject: Subject, path: Path, num_steps: int, num_sites: int) -> dict[str, str]:
    """Write and read one run, and return the lines of its column."""
    cpu_s, wall_s, commit = [], [], None
    for packet in synthetic_packets(num_steps, num_sites):
        commit = commit or subject.start(path, packet)
        begun_cpu, begun = time.process_time(), time.perf_counter()
        commit(packet)
        wall_s.append(time.perf_counter() - begun)
        cpu_s.append(time.process_time() - begun_cpu)
    subject.finish()
    files = [file for file in path.rglob("*") if file.is_file()]
    cold, warm = [], []
    for i in range(MEASURED_SERIES):
        drop_cache(path)
        for taken in (cold, warm):
            begun = time.perf_counter()
            assert subject.series(path, 7 * i) == num_steps
            taken.append(1e3 * (time.perf_counter() - begun))
    size = sum(file.stat().st_size for file in files)
    return {
        f"processor time a step, first {WINDOW}": _milliseconds(cpu_s[1 : WINDOW + 1]),
        f"processor time a step, last {WINDOW}": _milliseconds(cpu_s[-WINDOW:]),
        f"wall time a step, last {WINDOW}": _milliseconds(wall_s[-WINDOW:]),
        "bytes a site and step": f"{size / (num_steps * num_sites):.0f}",
        "files": f"{len(files)}",
        "one series, opened anew, cold": f"{statistics.median(cold):.0f} ms",
        "the same, files in memory": f"{statistics.median(warm):.0f} ms",
    }


def _milliseconds(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.1f} ms"


def main() -> None:
    """Measure every writer that is installed, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sites", type=int, default=500)
    parser.add_argument("--directory", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(describe_machine())
    columns: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        for name, make in (("rankfold", Rankfold), ("torchlens", TorchLens), ("torchinstruments", Torchinstruments)):
            try:
                subject: Subject = make()
            except ImportError as error:
                print(f"{name}: not installed ({error})")
                continue
            title = f"{name} {version(name)}"
            columns[title] = measure(subject, Path(folder) / name, options.steps, options.sites)
    print(f"\n{options.steps} steps × {options.sites} sites\n")
    print(f"| | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for line in next(iter(columns.values())):
        print(f"| {line} | {' | '.join(column[line] for column in columns.values())} |")


if __name__ == "__main__":
    main()
