"""What the commands that look at runs have in common: arguments, opening a run, choosing sites, and how they print."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from aggregator.history import History, open_history
from aggregator.strict_json import to_strict_json
from telemetry.errors import RankfoldError, SiteUnknownError

__all__ = [
    "EXIT_FOUND",
    "JsonOption",
    "KindOption",
    "RunArgument",
    "SalvageOption",
    "Series",
    "SiteArgument",
    "choose_series",
    "complete_kind",
    "complete_site",
    "console",
    "in_words",
    "open_run",
    "plain_table",
    "print_json",
    "print_losses",
    "progress",
    "progress_of_shares",
    "salvage_remedy",
]

EXIT_FOUND: Final = 3
"""Exit code of a command that was asked a question and answers no: damage was found, or two runs differ."""


_PIPE_WIDTH: Final = 1000


@dataclass(frozen=True)
class Series:
    """The newest series of one site."""

    kind: str
    site: str
    number: int


def console() -> Console:
    """Return the console of standard output: no colours under ``NO_COLOR`` or into a pipe, which gets long lines."""
    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=_PIPE_WIDTH)


def print_json(value: Any) -> None:
    """Print one strict JSON value on one line; NaN and infinities become null."""
    typer.echo(to_strict_json(value))


def open_run(path: Path, *, salvage: bool = False) -> History:
    """Open a run, and tell whoever meets damage how to go on.

    Raises:
        HistoryNotFoundError, HistoryVersionError, HistoryDamagedError: see ``aggregator.open_history``.
    """
    with salvage_remedy(salvage):
        return open_history(path, salvage=salvage)


@contextmanager
def salvage_remedy(salvage: bool) -> Iterator[None]:
    """Point to ``--salvage`` where damage keeps a command from its answer."""
    try:
        yield
    except RankfoldError as error:
        if error.code == "history_damaged" and not salvage:
            error.remedy = f"{error.remedy}; --salvage reads what is left, `rankfold verify` lists all damage"
        raise


def print_losses(history: History) -> None:
    """Say on standard error what ``--salvage`` had to leave out so far."""
    losses = history.losses().to_pylist()
    for loss in losses:
        where = "" if loss["step_lo"] is None else f", steps {loss['step_lo']} to {loss['step_hi']}"
        typer.echo(f"left out: {loss['file']}{where}: {loss['problem']}", err=True)


def choose_series(history: History, pattern: str, kind: str | None) -> list[Series]:
    """Return the newest series of every site that a name or a glob means, in the order in which they were first seen.

    Raises:
        SiteUnknownError, KindUnknownError: nothing is meant, with near names.
    """
    rows = history.sites().to_pylist()
    names = {row["site"] for row in rows}
    met = {name for name in names if name == pattern} or {n for n in names if fnmatch.fnmatchcase(n, pattern)}
    if not met or (kind is not None and not any(row["site"] in met and row["kind"] == kind for row in rows)):
        # The reader's own refusal has the near names.
        try:
            history.series(min(met) if met else pattern, kind or "activation", "total", steps=range(0))
        except SiteUnknownError as error:
            error.remedy = "give one of these, or a glob in quotes; `rankfold series RUN '*'` shows all"
            raise
    newest: dict[tuple[str, str], int] = {}
    for row in rows:
        if row["site"] in met and kind in (None, row["kind"]):
            newest[row["kind"], row["site"]] = row["series"]
    return [Series(kind, site, number) for (kind, site), number in newest.items()]


def complete_site(context: typer.Context, incomplete: str) -> list[str]:
    """Return the site names that begin as what was typed, for the shell."""
    return _complete(context, "site", incomplete)


def complete_kind(context: typer.Context, incomplete: str) -> list[str]:
    """Return the kinds of the run that begin as what was typed, for the shell."""
    return _complete(context, "kind", incomplete)


def _complete(context: typer.Context, column: str, incomplete: str) -> list[str]:
    try:
        words = dict.fromkeys(open_history(context.params["run"]).sites()[column].to_pylist())
    except Exception:  # a completion must never print a traceback into the command line
        return []
    return [word for word in words if word.startswith(incomplete)]


RunArgument = Annotated[
    Path, typer.Argument(help="Run directory: what was given to watch as `to`.", show_default=False)
]
SiteArgument = Annotated[
    str, typer.Argument(help="Name of a site, or a glob in quotes.", autocompletion=complete_site, show_default=False)
]
KindOption = Annotated[
    str | None, typer.Option("--kind", "-k", help="Only this kind of site.", autocompletion=complete_kind)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
SalvageOption = Annotated[
    bool, typer.Option("--salvage", help="Read what is left of a damaged run, and say what is not.")
]


def plain_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Iterable[str] = ()
) -> Table:
    """Return a table; columns named in ``right`` are aligned there."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    aligned = set(right)
    for name in columns:
        is_number = name in aligned
        table.add_column(
            name, justify="right" if is_number else "left", overflow="fold", no_wrap=is_number or name == "kind"
        )
    for row in rows:
        table.add_row(*(in_words(value) for value in row))
    return table


def in_words(value: Any) -> str:
    """Return a value as tables show it: a dash for none, three digits of a float."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Any]:
    """Show a bar on standard error while something long runs, at a terminal only.

    Yields:
        A function that is called with the number of parts that were done since.
    """
    with _terminal_bar(SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda parts=1: bar.advance(task, parts)


@contextmanager
def progress_of_shares(what: str) -> Iterator[Any]:
    """Show the same for work that tells its own progress.

    Yields:
        A function that is called with what is being done and which share of all is done.
    """
    with _terminal_bar(TextColumn("{task.description}"), BarColumn()) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda doing, share: bar.update(task, description=doing, completed=share)


def _terminal_bar(*columns: ProgressColumn) -> Progress:
    return Progress(
        *columns,
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    )
