"""Gates that are made to fail, to show that they can: by a word changed in a copy, or by functions replaced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from launch.gates.discover import GateFile, find_gates
from launch.gates.runner import RunOptions, run_gate
from launch.gates.verdict import judge

__all__ = ["gate_named", "measured_on_ranks", "reason_of", "rehearsed", "sabotaged"]


def gate_named(name: str) -> GateFile:
    """Return a gate of this installation."""
    return next(found for found in find_gates() if found.gate.name == name)


def sabotaged(name: str, folder: Path, old: str, new: str) -> GateFile:
    """Return the gate from a copy of its file in which ``old``, which is there once, is ``new``."""
    original = gate_named(name).file
    text = original.read_text()
    assert text.count(old) == 1, f"{old!r} is not there once"
    copies = folder / "sabotaged"
    copies.mkdir()
    (copies / original.name).write_text(text.replace(old, new))
    (found,) = find_gates(copies)
    return found


def rehearsed(found: GateFile, folder: Path) -> tuple[str, str]:
    """Rehearse a gate as a whole and return its verdict and the reason."""
    verdict = run_gate(found, RunOptions(folder / "out", rehearse=True))
    return verdict.verdict, verdict.reason


def reason_of(name: str, measured: dict[str, Any]) -> str:
    """Return why measured values fail a gate in a rehearsal, "" if they pass."""
    values = {key: value for key, value in measured.items() if value is not None}
    verdict, reason, _ = judge(gate_named(name).gate, values, is_rehearsal=True)
    assert (verdict == "failed") == bool(reason)
    return reason


def measured_on_ranks(
    rank: int, world_size: int, name: str, arguments: tuple[Any, ...], replace: Callable[[dict[str, Any]], None] | None
) -> Any:
    """Carry out ``train`` of a gate inside the job of ``tests.ranks`` and return what rank zero wrote.

    Args:
        rank, world_size: of this process.
        name: of the gate.
        arguments: of ``train``, without the backend, which is its last.
        replace: changes the names of the gate's file, its functions among them, before.
    """
    names = gate_named(name).run.__globals__
    written: list[Any] = []
    names.update(join_job=lambda _backend: torch.device("cpu"), write_result=written.append)
    if replace is not None:
        replace(names)
    names["train"](*arguments, "gloo")
    return written[0] if written else None
