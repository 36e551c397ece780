"""``rankfold watch``: a run while it is written."""

from __future__ import annotations

import sys
import time
from collections import deque
from dataclasses import dataclass
from dataclasses import field as attribute
from typing import Annotated, Any, Final

import pyarrow.compute as pc
import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from aggregator.history import Cursor, Followed, History, open_history
from launch.commands.series import FieldArgument
from launch.commands.shared import (
    JsonOption,
    KindOption,
    RunArgument,
    choose_series,
    complete_site,
    console,
    plain_table,
    print_json,
    progress,
)
from launch.commands.sparkline import sparkline
from telemetry.errors import HistoryNotFoundError
from telemetry.summary import SUMMARY_FIELDS

__all__ = ["watch"]

_POLL_S: Final = 0.25
_KEPT_STEPS: Final = 200
_KEPT_FINDINGS: Final = 8


def watch(
    run: RunArgument,
    site: Annotated[
        str, typer.Argument(help="Sites to show: a name or a glob in quotes.", autocompletion=complete_site)
    ] = "*",
    field_name: FieldArgument = "rms",
    kind: KindOption = "gradient",
    number: Annotated[int, typer.Option("-n", "--number", min=1, help="Sites to show at most.")] = 12,
    wait: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for a run that is not there yet.")] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Follow a run while it is written, until it is closed or Ctrl-C.

    At a terminal a table is kept up to date. Into a pipe, or with --json, every step is a line.
    """
    if field_name not in SUMMARY_FIELDS:
        raise typer.BadParameter(f"there is no field {field_name!r}; it may be {', '.join(SUMMARY_FIELDS)}")
    history = _await_run(run, wait)
    view = _View(site, field_name, kind, number)
    try:
        if sys.stdout.isatty() and not as_json:
            with Live(console=console(), refresh_per_second=4, transient=False) as live:
                for _ in _follow(history, view):
                    live.update(view.render(history))
        else:
            for news in _follow(history, view):
                _print_lines(news, as_json=as_json)
    except KeyboardInterrupt:
        return


def _await_run(path: Any, wait_s: float) -> History:
    deadline = time.monotonic() + wait_s
    with progress(f"waiting for {path}", None):
        while True:
            try:
                return open_history(path)
            except HistoryNotFoundError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_POLL_S)


def _follow(history: History, view: _View) -> Any:
    """Yield what is new, at once and then whenever there is something, until the run is closed."""
    cursor: Cursor | None = None
    while True:
        segments = history.segments()
        is_closed = segments.num_rows > 0 and bool(segments["sealed"][-1].as_py())
        news = history.follow(cursor)
        if news.cursor != cursor or cursor is None:
            cursor = news.cursor
            view.take(news)
            yield news
        if is_closed:
            return
        time.sleep(_POLL_S)


@dataclass
class _View:
    """What the table shows."""

    site: str
    field: str
    kind: str | None
    number: int
    steps: deque[dict[str, Any]] = attribute(default_factory=lambda: deque(maxlen=_KEPT_STEPS))
    findings: deque[dict[str, Any]] = attribute(default_factory=lambda: deque(maxlen=_KEPT_FINDINGS))

    def take(self, news: Followed) -> None:
        self.steps.extend(news.steps.slice(max(0, news.steps.num_rows - _KEPT_STEPS)).to_pylist())
        self.findings.extend(news.findings.to_pylist())

    def render(self, history: History) -> Group:
        if not self.steps:
            return Group(Text(f"{history.path}: no step is recorded yet"))
        last = self.steps[-1]
        own, whole = (sum(step[name] for step in self.steps) for name in ("self_s", "step_s"))
        missing = f", missing ranks {last['missing_ranks']}" if last["missing_ranks"] else ""
        head = Text(
            f"{history.path}  step {last['step']}, {last['num_ranks']} of {last['world_size']} ranks{missing}, "
            f"{last['step_s'] * 1e3:.3g} ms a step, own share {own / whole if whole else 0:.1%}, "
            f"{time.time() - last['wall_time_s']:.0f} s ago",
            style="bold",
        )
        found = [Text(f"step {row['step']}: {row['message']}", style="yellow") for row in self.findings]
        return Group(head, self._table(history), *found)

    def _table(self, history: History) -> Any:
        chosen = choose_series(history, self.site, self.kind)[: self.number]
        first = self.steps[0]["step"]
        names = list(dict.fromkeys(one.site for one in chosen))
        kinds = list(dict.fromkeys(one.kind for one in chosen))
        columns = ["step", "kind", "site", self.field]
        rows = history.observations(names, kinds, range(first, self.steps[-1]["step"] + 1), columns)
        lines = []
        for one in chosen:
            mine = rows.filter(pc.and_(pc.equal(rows["kind"], one.kind), pc.equal(rows["site"], one.site)))
            values = mine[self.field].to_pylist()
            lines.append((one.kind, one.site, sparkline(values), values[-1] if values else None))
        return plain_table("", ("kind", "site", self.field, "now"), lines, right=("now",))


def _print_lines(news: Followed, *, as_json: bool) -> None:
    findings = news.findings.to_pylist()
    for step in news.steps.to_pylist():
        if step["superseded"]:
            continue
        mine = [row for row in findings if row["step"] == step["step"] and row["segment"] == step["segment"]]
        if as_json:
            print_json({**step, "findings": mine})
            continue
        missing = f" missing={step['missing_ranks']}" if step["missing_ranks"] else ""
        typer.echo(
            f"step {step['step']} segment={step['segment']} ranks={step['num_ranks']}/{step['world_size']}{missing} "
            f"step_ms={step['step_s'] * 1e3:.4g} self_ms={step['self_s'] * 1e3:.3g} skipped={step['num_skipped']}"
        )
        for row in mine:
            typer.echo(f"  finding {row['code']}: {row['message']}")
    sys.stdout.flush()
