"""The record in Comet: metrics with explicit steps; histograms as assets, because Comet re-bins what it charts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aggregator.catalogue import MergedStep
from aggregator.sinks.points import DEFAULT_FIELDS, findings_text, histogram_document
from aggregator.sinks.protocol import RunInfo
from aggregator.sinks.tags import ANY_PRINTABLE
from aggregator.sinks.tracker import TrackerSink, require_library
from aggregator.strict_json import to_strict_json

if TYPE_CHECKING:
    from comet_ml import CometExperiment

__all__ = ["CometSink"]


class CometSink(TrackerSink):
    """Writes into the experiment that runs in the process, or into one of its own.

    An experiment that runs is used where neither a project nor a directory was given, and is never ended. One of the
    sink's own has a key that follows from the record, so that a restarted job continues it; it collects nothing of the
    process, and is ended at close.

    Example:
        >>> sink = CometSink(offline_directory="runs/exp1/comet")  # doctest: +SKIP
    """

    name = "comet"
    alphabet = ANY_PRINTABLE
    carries = frozenset({"scalar", "raw_histogram", "text", "run_metadata"})

    def __init__(
        self,
        project_name: str | None = None,
        fields: Sequence[str] = DEFAULT_FIELDS,
        *,
        workspace: str | None = None,
        offline_directory: Path | str | None = None,
        histograms: bool | None = None,
    ) -> None:
        """Say what goes where; nothing is started before the sink is opened.

        Args:
            project_name, workspace: of an experiment of the sink's own.
            fields: which of ``telemetry.summary.SUMMARY_FIELDS`` and ``nonfinite`` become metrics.
            offline_directory: write an archive there, to be sent later with ``comet upload``.
            histograms: False for none. Each step that has any becomes one JSON asset.

        Raises:
            SinkUnavailableError: comet_ml is not installed.
            FieldUnknownError: a field does not exist.
        """
        require_library("comet_ml", "comet_ml", "rankfold[comet]")
        super().__init__(fields, histograms)
        self.project_name = project_name
        self.workspace = workspace
        self.offline_directory = None if offline_directory is None else Path(offline_directory)
        self._experiment: CometExperiment | None = None
        self._is_ours = False

    def open(self, run: RunInfo) -> None:
        """Find the running experiment or start one."""
        import comet_ml

        running = comet_ml.get_running_experiment() if self._takes_running else None
        self._is_ours = running is None
        self._experiment = running or self._start(run)
        self.begin_segment(run)

    def describe(self, run: RunInfo) -> None:
        """Keep the run record as an asset."""
        self._opened.log_asset_data(to_strict_json(run.to_record()), name=f"rankfold/run-{run.segment:05d}.json")

    def emit(self, step: MergedStep) -> None:
        """Write the metrics of a step, and an asset each for its histograms and its findings."""
        experiment = self._opened
        experiment.log_metrics(self.scalars(step), step=step.step)
        document = histogram_document(step) if self.shows_histograms else None
        if document is not None:
            name = f"rankfold/histograms/step-{step.step:010d}.json"
            experiment.log_asset_data(to_strict_json(document), name=name, step=step.step)
        if text := findings_text(step):
            experiment.log_text(text, step=step.step)

    def flush(self) -> None:
        """Nothing is held back: Comet's own thread has the step."""

    def close(self) -> None:
        """End the experiment, if the sink has started it."""
        if self._experiment is not None and self._is_ours:
            self._experiment.end()
        self._experiment = None

    @property
    def _takes_running(self) -> bool:
        return self.project_name is None and self.workspace is None and self.offline_directory is None

    def _start(self, run: RunInfo) -> CometExperiment:
        import comet_ml

        offline: dict[str, Any] = {}
        if self.offline_directory is not None:
            self.offline_directory.mkdir(parents=True, exist_ok=True)
            offline = {"offline_directory": str(self.offline_directory)}
        config = comet_ml.ExperimentConfig(
            **offline,
            # Code, streams and machine of the training are not ours to read.
            disabled=False,
            log_code=False,
            log_graph=False,
            log_git_metadata=False,
            log_git_patch=False,
            log_env_details=False,
            parse_args=False,
            auto_param_logging=False,
            auto_metric_logging=False,
            auto_output_logging=False,
            auto_histogram_weight_logging=False,
            auto_histogram_gradient_logging=False,
            auto_histogram_activation_logging=False,
            display_summary_level=0,
        )
        return comet_ml.start(
            workspace=self.workspace,
            project_name=self.project_name,
            # Comet asks for 32 to 50 letters and digits.
            experiment_key=hashlib.blake2b(run.run_id.encode(), digest_size=16).hexdigest(),
            mode="get_or_create",
            online=self.offline_directory is None,
            experiment_config=config,
        )

    @property
    def _opened(self) -> CometExperiment:
        assert self._experiment is not None, "open comes first"
        return self._experiment
