"""``rankfold verify``: every checksum of a run, and whether its numbers can be true."""

from __future__ import annotations

import typer

from aggregator.history import verify as verify_bytes
from aggregator.history.invariants import broken_invariants
from launch.commands.shared import (
    EXIT_FOUND,
    JsonOption,
    RunArgument,
    console,
    open_run,
    plain_table,
    print_json,
    progress,
)

__all__ = ["verify"]


def verify(run: RunArgument, as_json: JsonOption = False) -> None:
    """Check every byte of a run, and then what its numbers must satisfy; exits 3 where something is wrong."""
    # Says what is no run at all, before any file is read.
    open_run(run, salvage=True)
    with progress("checksums", None):
        damage = verify_bytes(run).to_pylist()
    broken = []
    if not damage:
        history = open_run(run)
        with progress("invariants", history.coverage().num_rows) as advance:
            broken = list(broken_invariants(history, advance))
    if as_json:
        print_json({"sound": not damage and not broken, "damage": damage, "invariants": broken})
    else:
        _print(damage, broken)
    if damage or broken:
        raise typer.Exit(EXIT_FOUND)


def _print(damage: list[dict[str, object]], broken: list[dict[str, object]]) -> None:
    out = console()
    if not damage and not broken:
        out.print("sound: every checksum holds, and the numbers satisfy what they must")
    if damage:
        names: tuple[str, ...] = ("file", "table", "step_lo", "step_hi", "problem")
        rows = [tuple(row[name] for name in names) for row in damage]
        out.print(plain_table(f"{len(damage)} damaged ranges", names, rows, right=("step_lo", "step_hi")))
        out.print("undamaged parts can be read with --salvage; the invariants were not checked")
    if broken:
        names = ("step", "kind", "site", "problem")
        rows = [tuple(row[name] for name in names) for row in broken]
        out.print(plain_table(f"{len(broken)} rows that cannot be true", names, rows, right=("step",)))
