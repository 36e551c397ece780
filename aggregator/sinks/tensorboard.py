"""The record in TensorBoard: scalars for what one watches, exact raw histograms for what one looks at.

Tags are ``kind/site/field`` and never change. Values that do not exist make no point: a chart has a gap where nothing
was observed or nothing was finite, and the count of non-finite elements says why.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aggregator.catalogue import MergedStep
from aggregator.sinks.protocol import RunInfo
from aggregator.sinks.tensorboard_histogram import bucket_limits_and_counts
from aggregator.sinks.values import NONFINITE, step_values
from aggregator.strict_json import to_strict_json
from telemetry.errors import FieldUnknownError, SinkUnavailableError
from telemetry.presence import Presence
from telemetry.summary import SUMMARY_FIELDS
from telemetry.summary.fields import FINITE, FLOAT_FIELDS

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["DEFAULT_FIELDS", "TensorBoardSink"]

DEFAULT_FIELDS: Final = (
    "mean",
    "std",
    "rms",
    "l2",
    "min",
    "max",
    "absmax",
    "zero_fraction",
    "total",
    NONFINITE,
)


class TensorBoardSink:
    """Writes one event file for each attempt.

    Scalars are single precision, as TensorBoard reads them; histogram counts are exact up to 2^53.

    Example:
        >>> sink = TensorBoardSink("runs/exp1/tb", fields=("rms", "absmax", "nonfinite"))
    """

    name = "tensorboard"
    capabilities = frozenset({"scalar", "raw_histogram", "text", "run_metadata"})

    def __init__(self, log_dir: Path | str, fields: Sequence[str] = DEFAULT_FIELDS) -> None:
        """Name the directory; it is opened on the rank that writes the record.

        Args:
            log_dir: where event files go; several runs and attempts may share it.
            fields: which of ``telemetry.summary.SUMMARY_FIELDS`` and ``nonfinite`` become scalars. The norm of a site
                that is only sampled is an estimate and is left out; the history has it.

        Raises:
            SinkUnavailableError: TensorBoard is not installed.
            FieldUnknownError: a field does not exist.
        """
        if importlib.util.find_spec("tensorboard") is None:
            raise SinkUnavailableError("TensorBoard is not installed", remedy="pip install tensorboard")
        if unknown := [field for field in fields if field not in (*SUMMARY_FIELDS, NONFINITE)]:
            raise FieldUnknownError(
                f"TensorBoardSink got fields {unknown}", remedy=f"use {', '.join((*SUMMARY_FIELDS, NONFINITE))}"
            )
        self.log_dir = Path(log_dir)
        self.fields = tuple(fields)
        self._writer: SummaryWriter | None = None

    def open(self, run: RunInfo) -> None:
        """Open the event file; points from ``run.resume_step`` on that an earlier attempt wrote are purged."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(
            str(self.log_dir),
            purge_step=run.resume_step,
            # Two attempts of one second, on hosts of one name, still get files of their own.
            filename_suffix=f".{run.run_id[:8]}-{run.segment:05d}",
        )
        about = {"run_id": run.run_id, "segment": run.segment, "world_size": run.world_size, "run": run.run}
        self._writer.add_text("rankfold/run", f"    {to_strict_json(about)}", run.resume_step or 0)

    def emit(self, step: MergedStep) -> None:
        """Write the step as one event of scalars, one event a histogram, and a text if there are findings."""
        assert self._writer is not None, "open comes first"
        _write_scalars(self._writer, step, self._scalars(step))
        _write_histograms(self._writer, step)
        if step.packet.findings:
            text = "\n\n".join(f"**{finding['code']}** {finding['message']}" for finding in step.packet.findings)
            self._writer.add_text("rankfold/findings", text, step.step, _wall_time(step))

    def flush(self) -> None:
        """Write out what TensorBoard's writer still holds."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _scalars(self, step: MergedStep) -> dict[str, float]:
        facts = step.packet.facts
        found: dict[str, float] = {
            "rankfold/self_ms": facts.self_s * 1e3,
            "rankfold/step_ms": facts.step_s * 1e3,
            "rankfold/ranks_merged": step.num_ranks,
            "rankfold/findings": len(step.packet.findings),
        }
        for field in self.fields:
            for site, value in zip(step.sites, step_values(step, field), strict=True):
                if value is not None and not (field == "l2" and site.estimated):
                    found[f"{site.kind}/{site.name}/{field}"] = value
        return found


def _write_scalars(writer: SummaryWriter, step: MergedStep, scalars: dict[str, float]) -> None:
    from tensorboard.compat.proto.summary_pb2 import Summary

    # One event for all: a thousand calls of add_scalar take ten times as long.
    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
    file_writer: Any = writer.file_writer
    file_writer.add_summary(Summary(value=values), step.step, _wall_time(step))


def _write_histograms(writer: SummaryWriter, step: MergedStep) -> None:
    packet = step.packet
    row_of = {site.site_id: i for i, site in enumerate(step.sites)}
    for site_id, counts in zip(packet.hist_sites.tolist(), packet.hist_counts, strict=True):
        i = row_of[site_id]
        buckets = bucket_limits_and_counts(packet.descriptor, counts)
        if buckets is None or packet.presence[i] != Presence.OBSERVED:
            continue
        floats = dict(zip(FLOAT_FIELDS, packet.floats[i].tolist(), strict=True))
        writer.add_histogram_raw(
            f"{step.sites[i].kind}/{step.sites[i].name}/histogram",
            min=floats["min"],
            max=floats["max"],
            num=int(packet.ints[i, FINITE]),
            sum=floats["sum"],
            sum_squares=floats["sum_sq"],
            bucket_limits=buckets[0],
            bucket_counts=buckets[1],
            global_step=step.step,
            walltime=_wall_time(step),
        )


def _wall_time(step: MergedStep) -> float | None:
    return step.packet.facts.wall_time_s or None
