"""``rankfold ls``: the runs below a folder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from aggregator.history import open_history
from aggregator.history.layout import MANIFEST
from launch.commands.shared import JsonOption, console, plain_table, print_json
from telemetry.errors import RankfoldError

__all__ = ["FoundRun", "find_runs", "list_runs"]


@dataclass(frozen=True)
class FoundRun:
    """One run below the folder.

    Attributes:
        path: its directory.
        state: ``closed``, ``open`` (being written, or left by a writer that was killed), or ``unreadable``.
        run_id, num_segments, num_steps, last_step, world_size, model: of the run, None where it cannot be read.
        size_bytes: of all its files; written_s_ago: since the newest of them was written.
        problem: why it cannot be read, or "".
    """

    path: str
    state: str
    run_id: str | None
    num_segments: int | None
    num_steps: int | None
    last_step: int | None
    world_size: int | None
    model: str | None
    size_bytes: int
    written_s_ago: float
    problem: str = ""


def list_runs(
    folder: Annotated[Path, typer.Argument(help="Where to look, subfolders included.")] = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """List the runs below a folder, the one written last at the end."""
    if not folder.is_dir():
        typer.echo(f"{folder} is not a folder; name one that holds runs: rankfold ls FOLDER", err=True)
        raise typer.Exit(1)
    runs = sorted((_describe(path) for path in find_runs(folder)), key=lambda run: -run.written_s_ago)
    if as_json:
        print_json([asdict(run) for run in runs])
        return
    if not runs:
        typer.echo(f"there are no runs below {folder}")
        return
    rows = [
        (r.path, r.state, r.model, r.world_size, r.num_segments, r.num_steps, r.last_step, _size(r.size_bytes),
         _ago(r.written_s_ago))
        for r in runs
    ]  # fmt: skip
    names = ("run", "state", "model", "ranks", "segments", "steps", "last step", "size", "written")
    console().print(plain_table("", names, rows, right=names[3:]))
    for run in runs:
        if run.problem:
            typer.echo(f"{run.path}: {run.problem}", err=True)


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield the run directories at or below ``folder``; what lies inside of a run is not searched."""
    for place, folders, files in os.walk(folder):
        if MANIFEST in files:
            yield Path(place)
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def _describe(path: Path) -> FoundRun:
    files = [entry.stat() for entry in path.rglob("*") if entry.is_file()]
    size, written = sum(entry.st_size for entry in files), max(entry.st_mtime for entry in files)
    ago = max(0.0, time.time() - written)
    try:
        history = open_history(path)
        segments, steps = history.segments().to_pylist(), history.coverage()
        run = history.manifest["run"]
        return FoundRun(
            path=str(path),
            state="closed" if segments and segments[-1]["sealed"] else "open",
            run_id=history.run_id,
            num_segments=len(segments),
            num_steps=steps.num_rows,
            last_step=steps["step"][-1].as_py() if steps.num_rows else None,
            world_size=run.get("world_size"),
            model=run.get("model"),
            size_bytes=size,
            written_s_ago=ago,
        )
    except RankfoldError as error:
        unknown = dict.fromkeys(("run_id", "num_segments", "num_steps", "last_step", "world_size", "model"))
        return FoundRun(
            path=str(path), state="unreadable", size_bytes=size, written_s_ago=ago, problem=str(error), **unknown
        )


def _size(size_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000 or unit == "GB":
            break
        size_bytes /= 1000
    return f"{size_bytes:.3g} {unit}"


def _ago(seconds: float) -> str:
    for limit, unit, name in ((90, 1, "s"), (5400, 60, "min"), (129600, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name} ago"
    return f"{seconds / 86400:.0f} d ago"
