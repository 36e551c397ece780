"""What a finished run says at a glance, and the commands to look further."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
from rich.console import Console
from rich.table import Table

from aggregator.history import History

__all__ = ["Movement", "most_moved", "non_finite_line", "own_time_line", "print_run_report"]

NUM_SHOWN: Final = 8
NON_FINITE: Final = ("nan", "pos_inf", "neg_inf")


@dataclass(frozen=True)
class Movement:
    """Range of one positive quantity of a site over the steps."""

    site: str
    lowest: float
    highest: float

    @property
    def ratio(self) -> float:
        """Highest over lowest; infinite where the lowest is zero, 1 where both are."""
        if self.lowest == 0.0:
            return 1.0 if self.highest == 0.0 else float("inf")
        return self.highest / self.lowest


def most_moved(series: Sequence[tuple[str, Sequence[float]]], num_shown: int = NUM_SHOWN) -> list[Movement]:
    """Return the sites with the largest ratio of highest to lowest value, largest first; ties in order of name.

    Args:
        series: (site, values) with missing values already left out; a site without values is skipped.
        num_shown: how many to return at most.
    """
    found = [Movement(site, min(values), max(values)) for site, values in series if values]
    return sorted(found, key=lambda movement: (-movement.ratio, movement.site))[:num_shown]


def print_run_report(history: History, path: Path, console: Console) -> None:
    """Print the report of a run that lies in ``path``."""
    console.print(_gradient_table(history))
    observations = history.observations(columns=["step", "site", "kind", *NON_FINITE])
    for line in (non_finite_line(observations), own_time_line(history.steps()), _further(path)):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _gradient_table(history: History) -> Table:
    sites = history.sites().to_pylist()
    names = sorted(row["site"] for row in sites if row["kind"] == "gradient")
    table = Table(title="Gradient rms that moved most", title_justify="left")
    table.add_column("site")
    for name in ("lowest", "highest", "ratio"):
        table.add_column(name, justify="right")
    for moved in most_moved([(name, _rms(history, name)) for name in names]):
        table.add_row(moved.site, f"{moved.lowest:.3g}", f"{moved.highest:.3g}", f"{moved.ratio:.3g}")
    return table


def _rms(history: History, site: str) -> list[float]:
    values = history.series(site, "gradient", "rms").column("value").to_pylist()
    return [value for value in values if value is not None and value == value]


def non_finite_line(observations: pa.Table) -> str:
    """Say how many observations hold NaN or ±inf, and which came first.

    Args:
        observations: columns ``step site kind nan pos_inf neg_inf``; counts are null where nothing was observed.
    """
    rows = observations.to_pylist()
    bad = [row for row in rows if any(row[name] for name in NON_FINITE)]
    if not bad:
        return f"Non-finite values: none in {len(rows)} observations."
    first = min(bad, key=lambda row: int(row["step"]))
    where = f"{first['kind']} {first['site']} at step {first['step']}"
    return f"Non-finite values: in {len(bad)} of {len(rows)} observations, first in {where}."


def own_time_line(steps: pa.Table) -> str:
    """Say what part of the recorded steps was ours, on the slowest rank; columns ``self_s step_s`` in seconds."""
    own, whole = (sum(steps.column(name).to_pylist()) for name in ("self_s", "step_s"))
    share = f"{100 * own / whole:.1f} %" if whole else "unknown"
    return f"Own share of the time of the {steps.num_rows} recorded steps: {share}."


def _further(path: Path) -> str:
    commands = (
        f"{_beside_python('rankfold')} inspect {path}",
        f"{_beside_python('rankfold')} report {path} -o report.html",
        f"{_beside_python('tensorboard')} --logdir {path / 'tb'}",
    )
    return "\n  ".join(("To look further:", *commands))


def _beside_python(name: str) -> str:
    """Return the command of this environment, which need not be activated."""
    candidate = Path(sys.executable).with_name(name)
    return _shown(candidate) if candidate.exists() else name


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
