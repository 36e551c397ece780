"""What each tracker's own files hold, read with the tracker's own reader where it has one.

A target is a folder. ``scalars`` returns tag → step → value, ``histograms`` returns tag → step → exact counts between
edges, or whole counts by bin of the grid, and ``num_runs`` how many runs there are.
"""

from __future__ import annotations

import json
import struct
import time
import zipfile
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from aggregator.sinks import CometSink, MetricLoggerSink, MlflowSink, TensorBoardSink, WandbSink
from aggregator.sinks.bins import finite_bins
from telemetry.summary import Histogram, HistogramDescriptor

Series = dict[str, dict[int, Any]]
FIELDS = ("total", "nan", "min", "max", "sum", "sum_sq", "mean", "m4", "std", "rms", "l2", "zero_fraction", "nonfinite")
"""Counts, extremes, sums, a high moment and what is derived; MLflow's reader is too slow for all there are."""


class Tracker(ABC):
    """A tracker as the tests see it."""

    holds_float32: ClassVar[bool] = False

    @abstractmethod
    def make(self, folder: Path, **options: Any) -> Any:
        """Return a sink on the folder."""

    @abstractmethod
    def scalars(self, folder: Path) -> Series:
        """Return tag → step → value; of a step that was run again, the newest."""

    @abstractmethod
    def histograms(self, folder: Path) -> Series:
        """Return kind/site → step → what :meth:`shown` makes of the history's histogram."""

    @abstractmethod
    def num_runs(self, folder: Path) -> int:
        """Return how many runs, or files of runs, there are."""

    def shown(self, histogram: Histogram) -> Any:
        """Return a histogram of the history in the form of :meth:`histograms`."""
        return histogram.counts.tolist()

    def steps(self, folder: Path) -> list[int]:
        """Return the steps that arrived."""
        return sorted(self.scalars(folder)["rankfold/ranks_merged"])


class TensorBoard(Tracker):
    holds_float32 = True

    def make(self, folder, **options):
        return TensorBoardSink(folder / "tb", **options)

    def _events(self, folder):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        return EventAccumulator(str(folder / "tb"), size_guidance={"scalars": 0, "histograms": 0}).Reload()

    def scalars(self, folder):
        events = self._events(folder)
        return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}

    def histograms(self, folder):
        events = self._events(folder)
        found = {}
        for tag in events.Tags()["histograms"]:
            points = [(e.step, e.histogram_value) for e in events.Histograms(tag)]
            found[tag.removesuffix("/histogram")] = {s: [list(h.bucket_limit), list(h.bucket[1:])] for s, h in points}
        return found

    def shown(self, histogram):
        bins = finite_bins(histogram)
        return [bins.edges.tolist(), bins.counts.tolist()]

    def num_runs(self, folder):
        return len(list((folder / "tb").iterdir()))


class Wandb(Tracker):
    def make(self, folder, **options):
        return WandbSink(project="p", dir=str(folder), mode="offline", **options)

    def scalars(self, folder):
        found: Series = defaultdict(dict)
        for row in wandb_rows(folder):
            for tag, value in row.items():
                if isinstance(value, int | float) and not tag.startswith("_"):
                    found[tag][row["rankfold/step"]] = value
        return found

    def histograms(self, folder):
        found: Series = defaultdict(dict)
        for row in wandb_rows(folder):
            for tag, value in row.items():
                if isinstance(value, dict) and value.get("_type") == "histogram":
                    found[tag.removesuffix("/histogram")][row["rankfold/step"]] = [value["bins"], value["values"]]
        return found

    def shown(self, histogram):
        bins = finite_bins(histogram)
        return [bins.edges.tolist(), bins.counts.tolist()]

    def num_runs(self, folder):
        return len(wandb_files(folder))


class Mlflow(Tracker):
    def make(self, folder, **options):
        return MlflowSink("tests", tracking_uri=self._uri(folder), **options)

    def _uri(self, folder):
        return (folder / "mlruns").as_uri()

    def runs(self, folder):
        from mlflow import MlflowClient

        client = MlflowClient(self._uri(folder))
        return client, client.search_runs([e.experiment_id for e in client.search_experiments()])

    def scalars(self, folder):
        client, (run,) = self.runs(folder)
        return {
            tag: {m.step: m.value for m in client.get_metric_history(run.info.run_id, tag)} for tag in run.data.metrics
        }

    def histograms(self, folder):
        client, (run,) = self.runs(folder)
        paths = client.list_artifacts(run.info.run_id, "rankfold/histograms")
        files = [Path(client.download_artifacts(run.info.run_id, one.path)) for one in paths]
        return by_site(json.loads(file.read_text()) for file in files)

    def num_runs(self, folder):
        return len(self.runs(folder)[1])


class Comet(Tracker):
    def make(self, folder, **options):
        return CometSink(offline_directory=folder / "comet", **options)

    def scalars(self, folder):
        found: Series = defaultdict(dict)
        for archive in self.archives(folder):
            for message in comet_messages(archive):
                if message["type"] == "metric_msg":
                    metric = message["payload"]["metric"]
                    found[metric["metricName"]][metric["step"]] = metric["metricValue"]
        return found

    def histograms(self, folder):
        return by_site(
            json.loads(zipfile.ZipFile(archive).read(message["payload"]["file_path"]))
            for archive in self.archives(folder)
            for message in comet_messages(archive)
            if message["payload"].get("additional_params", {}).get("fileName", "").startswith("rankfold/histograms")
        )

    def archives(self, folder):
        return sorted((folder / "comet").glob("*.zip"), key=lambda path: path.stat().st_mtime_ns)

    def num_runs(self, folder):
        return len(self.archives(folder))


class LinesLogger:
    """A logger of the caller's, with a file for the test to read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log_metrics(self, metrics, step):
        with self.path.open("a") as file:
            file.write(json.dumps([step, metrics]) + "\n")


class Logger(Tracker):
    def make(self, folder, **options):
        return MetricLoggerSink(LinesLogger(folder / "logged.jsonl"), **options)

    def scalars(self, folder):
        found: Series = defaultdict(dict)
        for line in (folder / "logged.jsonl").read_text().splitlines():
            step, metrics = json.loads(line)
            for tag, value in metrics.items():
                found[tag][step] = value
        return found

    def histograms(self, folder):
        return {}

    def num_runs(self, folder):
        return len(list(folder.glob("*.jsonl")))


TRACKERS = {
    "tensorboard": TensorBoard(),
    "wandb": Wandb(),
    "mlflow": Mlflow(),
    "comet": Comet(),
    "metric_logger": Logger(),
}


def by_site(documents) -> Series:
    """Return kind/site → step → all counts, from the JSON documents of steps."""
    found: Series = defaultdict(dict)
    for document in documents:
        descriptor = HistogramDescriptor.from_wire(document["descriptor"])
        for one in document["histograms"]:
            counts = np.zeros(descriptor.num_counts, np.int64)
            counts[one["bins"]] = one["counts"]
            found[f"{one['kind']}/{one['site']}"][document["step"]] = counts.tolist()
    return found


def comet_messages(archive: Path) -> list[dict[str, Any]]:
    """Return the messages of an offline experiment."""
    return [json.loads(line) for line in zipfile.ZipFile(archive).read("messages.json").decode().splitlines()]


def wandb_files(folder: Path) -> list[Path]:
    """Return the run files under a folder, oldest first."""
    return sorted(folder.glob("wandb/*run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)


def wandb_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of history of all runs, values decoded, nested keys put together."""
    return [_row(record.history) for record in wandb_records(folder) if record.WhichOneof("record_type") == "history"]


def wandb_records(folder: Path) -> list[Any]:
    """Return the records of all run files.

    wandb has no public reader of its files. They are a log in LevelDB's form (blocks of 32 KiB; a fragment has a
    checksum, a length and a type) of messages of wandb's own protocol.
    """
    return [record for path in wandb_files(folder) for record in _finished_records(path)]


def _finished_records(path: Path) -> list[Any]:
    """Wait for the mark of the end: wandb's process may still be writing when ``finish`` has returned."""
    from wandb.proto.wandb_internal_pb2 import Record

    deadline = time.monotonic() + 20
    while True:
        records = [Record.FromString(data) for data in _logged(path.read_bytes())]
        if records and records[-1].WhichOneof("record_type") == "exit":
            return records
        assert time.monotonic() < deadline, f"{path} has no end"
        time.sleep(0.02)


def _logged(data: bytes) -> Iterator[bytes]:
    assert data[:4] == b":W&B"
    position, message = 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        if position + 7 + length > len(data):
            return  # still being written
        message += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last fragment
            yield message
            message = b""


def _row(history: Any) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for item in history.item:
        *parents, last = item.nested_key or [item.key]
        place = row
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = json.loads(item.value_json)
    return row
