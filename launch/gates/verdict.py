"""The verdict on one gate: judged from what was measured, written as JSON, never a silent skip."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from aggregator.strict_json import without_nonfinite
from launch.gates.spec import Gate

__all__ = ["Measurement", "State", "Verdict", "judge"]

State = Literal["passed", "failed", "not_run"]


@dataclass(frozen=True)
class Measurement:
    """One measured quantity beside its limit.

    Attributes:
        value: None where the gate did not measure it, which fails; in the file also where it is not finite.
        is_judged: whether it counts here; some limits say nothing in a rehearsal.
        holds: whether the value is within the limit.
    """

    name: str
    value: float | None
    comparison: str
    bound: float
    unit: str
    is_judged: bool
    holds: bool


@dataclass(frozen=True)
class Verdict:
    """What became of one gate.

    Attributes:
        gate: name; verdict: the state; reason: why it failed or was not run, "" if it passed.
        mode: ``cluster``, or ``rehearsal`` where the procedure was proven and not the machine.
        measured: every limit; notes: what else the gate found worth keeping, JSON-serialisable.
        machine: host, GPUs, nodes and versions; started_at: UTC, ISO 8601; duration_s: seconds.
    """

    gate: str
    verdict: State
    reason: str
    mode: Literal["cluster", "rehearsal"]
    purpose: str
    proves: str
    measured: tuple[Measurement, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    started_at: str = ""
    duration_s: float = 0.0

    def write(self, path: Path) -> None:
        """Write the verdict as one strict JSON file, whole or not at all; a value that is not finite becomes null."""
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(without_nonfinite(asdict(self)), indent=2) + "\n")
        draft.replace(path)


def judge(
    gate: Gate, measured: Mapping[str, float], *, is_rehearsal: bool
) -> tuple[State, str, tuple[Measurement, ...]]:
    """Compare what was measured with every limit of the gate; a quantity that is missing fails."""
    rows = tuple(_measurement(gate, index, measured, is_rehearsal) for index in range(len(gate.limits)))
    broken = [row for row in rows if row.is_judged and not row.holds]
    reason = "; ".join(
        f"{row.name} is {'not measured' if row.value is None else f'{row.value:g}'}, has to be {row.comparison} "
        f"{row.bound:g} {row.unit}".rstrip()
        for row in broken
    )
    return ("failed" if broken else "passed"), reason, rows


def _measurement(gate: Gate, index: int, measured: Mapping[str, float], is_rehearsal: bool) -> Measurement:
    limit = gate.limits[index]
    value = measured.get(limit.name)
    return Measurement(
        name=limit.name,
        value=value,
        comparison=limit.comparison,
        bound=limit.bound,
        unit=limit.unit,
        is_judged=not (is_rehearsal and limit.on_gpu_only),
        holds=value is not None and limit.holds(value),
    )
