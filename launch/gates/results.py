"""The folder of a run of gates: one JSON file a verdict, and a folder of the gate's own files beside it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, get_args

from launch.gates.verdict import Measurement, State, Verdict
from telemetry.errors import ConfigurationError, VerdictExistsError, VerdictMalformedError

__all__ = ["clear_results", "read_verdict", "read_verdicts", "refuse_earlier_results", "verdict_file"]

_EXPECTED: Final[Mapping[str, type | tuple[type, ...]]] = {
    "gate": str, "verdict": str, "reason": str, "mode": str, "purpose": str, "proves": str, "measured": list,
    "notes": dict, "machine": dict, "started_at": str, "duration_s": (int, float),
}  # fmt: skip
_REMEDY: Final = "remove the file, or name a folder that `rankfold gate run --out` has written"


def verdict_file(out: Path, gate: str) -> Path:
    """Return where the verdict on a gate lies."""
    return out / f"{gate}.json"


def refuse_earlier_results(out: Path, gates: Sequence[str]) -> None:
    """Refuse a folder that has something of one of these gates already.

    Raises:
        VerdictExistsError: it has.
    """
    there = [name for name in gates if verdict_file(out, name).exists() or (out / name).exists()]
    if there:
        raise VerdictExistsError(
            f"{out} already holds results of {', '.join(there)}",
            remedy="name another --out, or replace them by --force",
        )


def clear_results(out: Path, gates: Sequence[str]) -> None:
    """Remove what earlier runs of these gates left."""
    for name in gates:
        verdict_file(out, name).unlink(missing_ok=True)
        shutil.rmtree(out / name, ignore_errors=True)


def read_verdicts(out: Path) -> list[Verdict]:
    """Return the verdicts of a folder by name of the gate.

    Raises:
        ConfigurationError: there are none.
        VerdictMalformedError: a file is not one.
    """
    files = sorted(out.glob("*.json"))
    if not files:
        raise ConfigurationError(
            f"{out} holds no verdicts", remedy="name the folder given to `rankfold gate run --out`"
        )
    return [read_verdict(file) for file in files]


def read_verdict(file: Path) -> Verdict:
    """Return the verdict in one file.

    Raises:
        VerdictMalformedError: it is not one.
    """
    try:
        wire = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise VerdictMalformedError(f"{file} cannot be read as JSON: {error}", remedy=_REMEDY) from error
    _require(
        file, isinstance(wire, dict) and wire.keys() == _EXPECTED.keys(), f"has not the keys {', '.join(_EXPECTED)}"
    )
    for name, kind in _EXPECTED.items():
        _require(file, isinstance(wire[name], kind), f"has a {name} that is {wire[name]!r}")
    _require(file, wire["verdict"] in get_args(State), f"has the verdict {wire['verdict']!r}")
    _require(file, wire["mode"] in ("cluster", "rehearsal"), f"has the mode {wire['mode']!r}")
    _require(file, wire["gate"] == file.stem, f"is about the gate {wire['gate']!r}")
    _require(file, all(map(_is_measurement, wire["measured"])), "has a measured quantity without its limit")
    return Verdict(**{**wire, "measured": tuple(Measurement(**row) for row in wire["measured"])})


def _is_measurement(row: Any) -> bool:
    if not isinstance(row, Mapping) or row.keys() != {field.name for field in fields(Measurement)}:
        return False
    is_value = row["value"] is None or isinstance(row["value"], (int, float))
    words = all(isinstance(row[name], str) for name in ("name", "comparison", "unit"))
    answers = all(isinstance(row[name], bool) for name in ("is_judged", "holds"))
    return is_value and words and answers and isinstance(row["bound"], (int, float))


def _require(file: Path, holds: bool, problem: str) -> None:
    if not holds:
        raise VerdictMalformedError(f"{file} {problem}", remedy=_REMEDY)
