"""The record as lines of JSON, for ``grep``, ``jq`` and whoever tails a run.

A file is a row of sections, one for each segment: a header line, then for each step one line an observation, one a
finding, and last the step's own line, which says that the step is whole; a footer line ends an attempt that closed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from aggregator.catalogue import MergedStep
from aggregator.sinks.bins import sparse_counts
from aggregator.sinks.protocol import RunInfo
from aggregator.sinks.values import step_values
from aggregator.strict_json import to_strict_json
from telemetry.errors import SinkUnavailableError
from telemetry.packet import NO_RANK
from telemetry.presence import Presence
from telemetry.summary import SUMMARY_FIELDS

__all__ = ["JSONL_FORMAT", "JsonlSink", "read_lines"]

JSONL_FORMAT: Final = "rankfold.jsonl.v1"

_TAIL_BYTES: Final = 1 << 16


class JsonlSink:
    """Appends to a file, unbuffered: a step is in the file when ``emit`` returns, or not at all.

    A file that is there is continued, never overwritten; a last line that a killed writer left torn is cut off.

    Example:
        >>> sink = JsonlSink("runs/exp1/metrics.jsonl")
    """

    name = "jsonl"
    capabilities = frozenset({"scalar", "raw_histogram", "text", "structured_event", "run_metadata"})

    def __init__(self, path: Path | str) -> None:
        """Name the file; it is opened on the rank that writes the record."""
        self.path = Path(path)
        self._file: int | None = None
        self._num_steps = 0
        self._last_step: int | None = None
        self._torn = False

    def open(self, run: RunInfo) -> None:
        """Open the file and append the header.

        Raises:
            SinkUnavailableError: the file holds something else.
            OSError: it cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._require_ours(self._file)
        _cut_torn_line(self._file)
        self._append([_header(run)])

    def begin_segment(self, run: RunInfo) -> None:
        """End the section of the segment before, and begin one."""
        self._append([self._footer(), _header(run)])
        self._num_steps, self._last_step = 0, None

    def emit(self, step: MergedStep) -> None:
        """Append the lines of a step; on an error none of them stays."""
        self._append([*_observations(step), *_findings(step), _step(step)])
        self._num_steps += 1
        self._last_step = step.step

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Append the footer, unless a step failed, and close the file."""
        if self._file is None:
            return
        try:
            if not self._torn:
                self._append([self._footer()])
        finally:
            os.close(self._file)
            self._file = None

    def _footer(self) -> Mapping[str, Any]:
        return {"type": "footer", "num_steps": self._num_steps, "last_step": self._last_step}

    def _require_ours(self, file: int) -> None:
        first = os.pread(file, _TAIL_BYTES, 0)
        if first and f'"format":"{JSONL_FORMAT}"'.encode() not in first.split(b"\n", 1)[0]:
            os.close(file)
            self._file = None
            raise SinkUnavailableError(
                f"{self.path} does not begin as a {JSONL_FORMAT} file", remedy="give JsonlSink a new file"
            )

    def _append(self, lines: list[Mapping[str, Any]]) -> None:
        assert self._file is not None, "open comes first"
        data = "".join(to_strict_json(line) + "\n" for line in lines).encode()
        end = os.lseek(self._file, 0, os.SEEK_END)
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            self._torn = True
            os.ftruncate(self._file, end)
            raise


def _header(run: RunInfo) -> Mapping[str, Any]:
    return {"type": "header", "format": JSONL_FORMAT, **run.to_record()}


def _cut_torn_line(file: int) -> None:
    end = os.lseek(file, 0, os.SEEK_END)
    position = end
    while position > 0:
        start = max(0, position - _TAIL_BYTES)
        newline = os.pread(file, position - start, start).rfind(b"\n")
        if newline >= 0:
            position = start + newline + 1
            break
        position = start
    if position != end:
        os.ftruncate(file, position)


def _observations(step: MergedStep) -> Iterator[Mapping[str, Any]]:
    packet = step.packet
    values = {field: step_values(step, field) for field in SUMMARY_FIELDS}
    histograms = dict(zip(packet.hist_sites.tolist(), packet.hist_counts, strict=True))
    for i, site in enumerate(step.sites):
        presence = Presence(int(packet.presence[i]))
        if presence is Presence.NOT_SCHEDULED:
            continue
        line = {
            "type": "observation",
            "step": step.step,
            "site": site.name,
            "kind": site.kind,
            "presence": presence.label,
            "reason": packet.reasons[packet.reason[i]] if packet.reason[i] >= 0 else None,
            "estimated": site.estimated,
            "num_observed": int(packet.num_observed[i]),
            "absmax_rank": _rank(packet.absmax_rank[i]),
            "num_nonfinite_ranks": int(packet.num_nonfinite_ranks[i]),
            "first_nonfinite_rank": _rank(packet.first_nonfinite_rank[i]),
            **{field: column[i] for field, column in values.items()},
        }
        if (counts := histograms.get(site.site_id)) is not None and presence is Presence.OBSERVED:
            line["histogram"] = sparse_counts(counts)
        yield line


def _rank(rank: Any) -> int | None:
    return None if rank == NO_RANK else int(rank)


def _findings(step: MergedStep) -> Iterator[Mapping[str, Any]]:
    for finding in step.packet.findings:
        yield {**finding, "type": "finding", "step": step.step}


def _step(step: MergedStep) -> Mapping[str, Any]:
    return {
        "type": "step",
        "step": step.step,
        **vars(step.packet.facts),
        "world_size": step.packet.world_size,
        "num_ranks": step.num_ranks,
        "num_findings": len(step.packet.findings),
        "missing": {str(rank): reason for rank, reason in sorted(step.missing.items())},
    }


def read_lines(path: Path | str) -> list[dict[str, Any]]:
    """Return the whole lines of a file; a torn last one is left out."""
    whole = Path(path).read_bytes().rpartition(b"\n")[0]
    return [json.loads(line) for line in whole.splitlines()]
