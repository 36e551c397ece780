"""The record in Weights & Biases: one row a step, on an axis of its own.

wandb drops a row whose ``step=`` is not larger than that of the row before, and a resumed run begins with steps that it
had already. So rows are never given a step: ``rankfold/step`` is a column, and ``define_metric`` makes it the axis of
everything written here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from aggregator.catalogue import MergedStep
from aggregator.sinks.bins import coarsened_bins
from aggregator.sinks.points import DEFAULT_FIELDS, findings_text, histogram_points
from aggregator.sinks.protocol import RunInfo
from aggregator.sinks.tags import WORDS_AND_PUNCTUATION, step_tag
from aggregator.sinks.tracker import TrackerSink, require_library
from aggregator.strict_json import without_nonfinite

if TYPE_CHECKING:
    import wandb

__all__ = ["WandbSink"]

_STEP: Final = step_tag("step")
_OFFLINE: Final = ("offline", "dryrun")


class WandbSink(TrackerSink):
    """Writes into the run that is active in the process, or into one of its own.

    An active run is used where no argument of ``wandb.init`` was given, and is never finished. A run that the sink has
    started is not made the active one, and is finished at close. Counts are exact integers; a histogram of more than
    512 bins, which wandb refuses, is put on a coarser grid without a change of its total.

    Example:
        >>> sink = WandbSink(project="exp1", mode="offline", dir="runs/exp1")  # doctest: +SKIP
    """

    name = "wandb"
    alphabet = WORDS_AND_PUNCTUATION
    carries = frozenset({"scalar", "raw_histogram", "text", "run_metadata"})

    def __init__(self, fields: Sequence[str] = DEFAULT_FIELDS, *, histograms: bool | None = None, **init: Any) -> None:
        """Say what goes where; nothing is started before the sink is opened.

        Args:
            fields: which of ``telemetry.summary.SUMMARY_FIELDS`` and ``nonfinite`` become scalars.
            histograms: False for none.
            **init: arguments of ``wandb.init`` for a run of the sink's own, such as project, name, dir and mode.

        Raises:
            SinkUnavailableError: wandb is not installed.
            FieldUnknownError: a field does not exist.
        """
        require_library("wandb", "wandb", "rankfold[wandb]")
        super().__init__(fields, histograms)
        self.init = init
        self._run: wandb.Run | None = None
        self._is_ours = False
        self._coarsest: int | None = None

    @property
    def disclosures(self) -> tuple[str, ...]:
        """Changed names, and how coarse a histogram had to become."""
        told = super().disclosures
        if self._coarsest is None:
            return told
        return (*told, f"histograms of more than 512 bins are shown with down to {self._coarsest} bins an octave")

    def open(self, run: RunInfo) -> None:
        """Find the active run or start one, and define the axis.

        A run of the sink's own has the id of the record, so that a restarted job continues it. An offline run cannot
        know where it was left: each attempt then has an id of its own, in one group.
        """
        import wandb

        active = None if self.init else wandb.run
        self._is_ours = active is None
        self._run = active or self._start(run)
        self.begin_segment(run)
        self._run.define_metric(_STEP, hidden=True)
        self._run.define_metric(step_tag("*"), step_metric=_STEP)

    def describe(self, run: RunInfo) -> None:
        """Put the run record into the config."""
        self._opened.config.update({"rankfold": without_nonfinite(run.to_record())}, allow_val_change=True)

    def emit(self, step: MergedStep) -> None:
        """Write the step as one row."""
        run = self._opened
        for kind in dict.fromkeys(site.kind for site in step.new_sites):
            run.define_metric(f"{self.alphabet.foreign.sub('_', kind)}/*", step_metric=_STEP)
        row: dict[str, Any] = {_STEP: step.step, **self.scalars(step)}
        if self.shows_histograms:
            row.update(self._histograms(step))
        if text := findings_text(step):
            row[step_tag("findings_text")] = text
        run.log(row)

    def flush(self) -> None:
        """Nothing is held back: wandb's own process has the row."""

    def close(self) -> None:
        """Finish the run, if the sink has started it."""
        if self._run is not None and self._is_ours:
            self._run.finish()
        self._run = None

    def _start(self, run: RunInfo) -> wandb.Run:
        import wandb

        mode = self.init.get("mode") or wandb.setup().settings.mode
        continues = run.segment > 0 and mode in _OFFLINE
        defaults: dict[str, Any] = {
            "id": f"{run.run_id}-{run.segment}" if continues else run.run_id,
            "group": run.run_id,
            "resume": "allow",
            # Later calls of wandb.init and wandb.log in the training script are about its own run.
            "reinit": "create_new",
            # Streams, code and machine of the training are not ours to read.
            "settings": wandb.Settings(
                console="off", disable_git=True, save_code=False, x_disable_stats=True, silent=True
            ),
        }
        return wandb.init(**{**defaults, **self.init})

    def _histograms(self, step: MergedStep) -> dict[str, wandb.Histogram]:
        import wandb

        found = {}
        for point in histogram_points(step):
            name, coarsened = self.tags.name(point.site), coarsened_bins(point.histogram, wandb.Histogram.MAX_LENGTH)
            if name is None or coarsened is None:
                continue
            bins, bins_per_octave = coarsened
            if bins_per_octave < point.histogram.descriptor.bins_per_octave:
                self._coarsest = min(bins_per_octave, self._coarsest or bins_per_octave)
            found[f"{name}/histogram"] = wandb.Histogram(np_histogram=(bins.counts, bins.edges))
        return found

    @property
    def _opened(self) -> wandb.Run:
        assert self._run is not None, "open comes first"
        return self._run
