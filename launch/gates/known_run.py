"""A record whose every number follows from its step: gates write it, break things, and know what it has to hold."""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from aggregator.catalogue import Catalogue
from aggregator.history import FoldingPolicy, HistoryWriter, open_history
from aggregator.testing.packets import make_packet, make_site, make_step
from launch.gates.children import Tell
from telemetry.errors import RankfoldError
from telemetry.packet import Packet
from telemetry.summary import DEFAULT_DESCRIPTOR, summarize

__all__ = ["NUM_SITES", "Seen", "commit_known", "examine", "known_packet"]

NUM_SITES: Final = 3
_SITES: Final = tuple(make_site(f"layers.{i}") for i in range(NUM_SITES))
# Folds early, so that files are replaced while others read and writers die.
_FOLDING: Final = FoldingPolicy(fan_in=(8, 4))
_COLUMNS: Final = ("step", "site", "superseded", "total", "max", "sum")


@lru_cache(maxsize=64)
def known_packet(step: int) -> Packet:
    """Return the packet of a step."""
    values = torch.tensor([float(step), -1.0, 0.5])
    return make_packet(step, {site: summarize(values, histogram=True) for site in _SITES})


def commit_known(run: Path, resume_step: int | None, num_steps: int, tell: Tell) -> None:
    """Commit steps one by one; tells each, with the time of day at which it was durable and what that took, seconds.

    Args:
        run: the run directory.
        resume_step: first step of a continuation; None begins the run with step 0.
        num_steps: after which the run is closed.
        tell: is called after each commit.
    """
    writer, catalogue = HistoryWriter.create(run, {}, DEFAULT_DESCRIPTOR, resume_step, folding=_FOLDING), Catalogue()
    for step in range(resume_step or 0, (resume_step or 0) + num_steps):
        begun = time.time()
        writer.commit(make_step(known_packet(step), catalogue))
        tell((step, time.time(), time.time() - begun))
    writer.close()


class Seen(NamedTuple):
    """What a read showed: the number of steps, and what they have that they must not have."""

    num_steps: int
    problems: list[str]


def examine(run: Path) -> Seen:
    """Read a run of known steps, which begin with 0, from one snapshot; that it cannot be read is a problem."""
    try:
        seen = open_history(run).follow(None, list(_COLUMNS))
    except (RankfoldError, OSError) as error:
        return Seen(0, [f"{type(error).__name__}: {error}"])
    steps = _shown(seen.steps)["step"].to_numpy()
    return Seen(len(steps), _problems(steps, _shown(seen.observations)))


def _problems(steps: NDArray[np.int64], rows: pa.Table) -> list[str]:
    problems = []
    if not np.array_equal(np.sort(steps), np.arange(len(steps))):
        problems.append(f"steps are not 0 to {len(steps) - 1}: {_shortened(steps)}")
    if rows.num_rows != NUM_SITES * len(steps):
        problems.append(f"{rows.num_rows} rows for {len(steps)} steps of {NUM_SITES} sites")
    step = rows["step"].to_numpy()
    expected = {"total": np.full(len(step), 3), "max": np.maximum(step, 0.5), "sum": step - 0.5}
    return problems + [
        f"{name} differs at steps {_shortened(step[wrong])}"
        for name, values in expected.items()
        if (wrong := rows[name].to_numpy() != values).any()
    ]


def _shown(table: pa.Table) -> pa.Table:
    return table.filter(pc.invert(table["superseded"]))


def _shortened(steps: NDArray[np.int64]) -> str:
    return ", ".join(map(str, steps[:8])) + (", …" if len(steps) > 8 else "")
