"""What a session is going to do and what that costs, known before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from telemetry.collect.settings import DISABLE_VARIABLE, Setting
from telemetry.layout import ParallelLayout

__all__ = ["Plan", "PlannedSignal"]


@dataclass(frozen=True)
class PlannedSignal:
    """One signal on this rank.

    Attributes:
        signal: its name, or the source kind of call sites; every: its interval in steps.
        num_sites: sites, or selected modules where the tensors show only when the model runs, None for call sites.
        num_elements: elements reduced on a logged step, None where that is not known yet.
        size_bytes: bytes read on a logged step, None likewise.
    """

    signal: str
    every: int
    num_sites: int | None
    num_elements: int | None
    size_bytes: int | None


@dataclass(frozen=True)
class Plan:
    """The plan of a session on this rank; ``print(session.plan)`` shows it.

    Attributes:
        to, run_id, segment: where the record goes.
        rank, world_size, layout: this rank in its job.
        signals: one entry for each signal.
        hist_every: interval of histograms in steps, None for none.
        budget_ms: milliseconds that observing may take of a logged step, None for no limit.
        backend: what reduces the tensors.
        selection: ``select`` and ``exclude`` in words.
        settings: the settings that are no defaults, with their origin.
        disabled_by: ranks whose kill switch has turned the session off on all ranks.
        unrecorded: why a session that is turned off has no record of that, or "".
        compile_obstacle: why tensors inside of compiled code cannot be observed, "" where they can.
    """

    to: str
    run_id: str
    segment: int
    rank: int
    world_size: int
    layout: ParallelLayout
    signals: tuple[PlannedSignal, ...]
    hist_every: int | None
    backend: str
    selection: str
    settings: tuple[Setting, ...] = ()
    disabled_by: tuple[int, ...] = ()
    unrecorded: str = ""
    budget_ms: float | None = None
    compile_obstacle: str = ""

    def __str__(self) -> str:
        histograms = f"every {self.hist_every}" if self.hist_every else "none"
        lines = [
            f"Rankfold plan for {self.to} (run {self.run_id}, segment {self.segment})",
            f"  rank {self.rank} of {self.world_size}, layout {self.layout}, kernels {self.backend}",
            f"  select {self.selection}, histograms {histograms}",
            f"  {'signal':<18}{'every':>6}{'sites':>8}{'elements a step':>18}{'read a step':>14}",
        ]
        lines += [_row(signal) for signal in self.signals]
        if self.budget_ms is not None:
            lines.append(f"  at most {self.budget_ms:g} ms of a logged step; what does not fit is left out and said so")
        if self.disabled_by:
            lines += self._disabled_lines()
        elif not self.signals:
            lines.append("  no signals: only explicit call sites are observed")
        if self.compile_obstacle:
            lines.append(f"  modules in compiled code are unsupported: {self.compile_obstacle}")
        return "\n".join([*lines, *(f"  {setting}" for setting in self.settings)])

    def _disabled_lines(self) -> list[str]:
        ranks = ", ".join(map(str, self.disabled_by))
        lines = [f"  DISABLED: {DISABLE_VARIABLE} is set on rank {ranks}; nothing is observed on any rank"]
        return lines + ([f"  and nothing is recorded: {self.unrecorded}"] if self.unrecorded else [])


def _row(signal: PlannedSignal) -> str:
    sites = "" if signal.num_sites is None else str(signal.num_sites)
    elements = "at first forward" if signal.num_elements is None else f"{signal.num_elements:,}"
    size = "" if signal.size_bytes is None else _human_bytes(signal.size_bytes)
    return f"  {signal.signal:<18}{signal.every:>6}{sites:>8}{elements:>18}{size:>14}"


def _human_bytes(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024 or unit == "GiB":
            break
        size_bytes /= 1024
    return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
