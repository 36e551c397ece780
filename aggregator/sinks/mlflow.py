"""The record in MLflow: metrics with explicit steps; histograms, findings and the run record as artifacts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final

from aggregator.catalogue import MergedStep
from aggregator.sinks.points import DEFAULT_FIELDS, findings_text, histogram_document
from aggregator.sinks.protocol import RunInfo
from aggregator.sinks.tags import WORDS_AND_PUNCTUATION
from aggregator.sinks.tracker import TrackerSink, require_library
from aggregator.strict_json import without_nonfinite

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

__all__ = ["MlflowSink"]

_METRICS_A_BATCH: Final = 1000  # MLflow's own limit
_RUN_TAG: Final = "rankfold.run_id"


class MlflowSink(TrackerSink):
    """Writes into a run that is there, or into one of its own.

    A given run, or the one that is active in the thread that makes the sink, is used and never ended. A run of the
    sink's own carries the id of the record as a tag, by which a restarted job finds and continues it; it is ended at
    close. MLflow keeps numbers as float64, so counts are exact up to 2^53; a histogram is exact to the last count.

    Example:
        >>> sink = MlflowSink("exp1", tracking_uri="sqlite:///mlflow.db")  # doctest: +SKIP
    """

    name = "mlflow"
    alphabet = WORDS_AND_PUNCTUATION
    carries = frozenset({"scalar", "raw_histogram", "text", "run_metadata"})

    def __init__(
        self,
        experiment: str | None = None,
        fields: Sequence[str] = DEFAULT_FIELDS,
        *,
        run_id: str | None = None,
        tracking_uri: str | None = None,
        run_name: str | None = None,
        histograms: bool | None = None,
    ) -> None:
        """Say what goes where; no store is touched before the sink is opened.

        Args:
            experiment: name of the experiment for a run of the sink's own, made if it is not there; MLflow's default
                experiment if None.
            fields: which of ``telemetry.summary.SUMMARY_FIELDS`` and ``nonfinite`` become metrics.
            run_id: of a run to write into.
            tracking_uri: of the store; that of MLflow's own settings if None.
            run_name: for a run of the sink's own.
            histograms: False for none. Each step that has any becomes one JSON file.

        Raises:
            SinkUnavailableError: MLflow is not installed.
            FieldUnknownError: a field does not exist.
        """
        require_library("mlflow", "MLflow", "rankfold[mlflow]")
        super().__init__(fields, histograms)
        self.experiment = experiment
        self.run_name = run_name
        self.run_id, self.tracking_uri = run_id, tracking_uri
        if run_id is None and experiment is None and tracking_uri is None:
            self.run_id, self.tracking_uri = _active_run()
        self._client: MlflowClient | None = None
        self._written_run = ""

    def open(self, run: RunInfo) -> None:
        """Find the run, or start one, and write the run record into it."""
        from mlflow import MlflowClient

        self._client = MlflowClient(self.tracking_uri)
        self._written_run = self.run_id or self._own_run(self._client, run)
        self.begin_segment(run)

    def describe(self, run: RunInfo) -> None:
        """Keep the run record as a file."""
        record = without_nonfinite(run.to_record())
        self._opened.log_dict(self._written_run, record, f"rankfold/run-{run.segment:05d}.json")

    def emit(self, step: MergedStep) -> None:
        """Write the metrics of a step in batches, and a file each for its histograms and its findings."""
        client, run_id = self._opened, self._written_run
        metrics = self._metrics(step)
        while batch := list(islice(metrics, _METRICS_A_BATCH)):
            client.log_batch(run_id, metrics=batch, synchronous=True)
        document = histogram_document(step) if self.shows_histograms else None
        if document is not None:
            client.log_dict(run_id, dict(document), f"rankfold/histograms/step-{step.step:010d}.json")
        if text := findings_text(step):
            client.log_text(run_id, text, f"rankfold/findings/step-{step.step:010d}.md")

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """End the run, if the sink has started it."""
        if self._client is not None and self._written_run and self.run_id is None:
            self._client.set_terminated(self._written_run)
        self._client = None

    def _own_run(self, client: MlflowClient, run: RunInfo) -> str:
        experiment_id = "0" if self.experiment is None else self._experiment_id(client, self.experiment)
        found = client.search_runs([experiment_id], f"tags.`{_RUN_TAG}` = '{run.run_id}'", max_results=1)
        if found:
            run_id = str(found[0].info.run_id)
            client.set_terminated(run_id, "RUNNING")
            return run_id
        tags = {_RUN_TAG: run.run_id}
        return str(client.create_run(experiment_id, tags=tags, run_name=self.run_name).info.run_id)

    @staticmethod
    def _experiment_id(client: MlflowClient, name: str) -> str:
        known = client.get_experiment_by_name(name)
        return str(client.create_experiment(name) if known is None else known.experiment_id)

    def _metrics(self, step: MergedStep) -> Iterator[Metric]:
        from mlflow.entities import Metric

        timestamp_ms = int(step.packet.facts.wall_time_s * 1000)
        for tag, value in self.scalars(step).items():
            yield Metric(tag, float(value), timestamp_ms, step.step)

    @property
    def _opened(self) -> MlflowClient:
        assert self._client is not None, "open comes first"
        return self._client


def _active_run() -> tuple[str | None, str | None]:
    """Return id and store of this thread's active run; MLflow keeps one for each thread, and the sink has its own."""
    mlflow = sys.modules.get("mlflow")
    active = None if mlflow is None else mlflow.active_run()
    return (None, None) if mlflow is None or active is None else (active.info.run_id, mlflow.get_tracking_uri())
