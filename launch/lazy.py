"""Commands whose modules are imported when they are called: torch alone takes longer to load than to answer --help."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

__all__ = ["LAZY_COMMANDS", "LazyCommand", "LazyGroup", "words_after_dashes"]

_SCRIPT: Final = "rankfold.script"


class LazyCommand(NamedTuple):
    """Where a command is, or the app of a group of commands, and the first line of its help.

    ``starts_script`` is for a command line with that of another program behind ``--``, and with options of a third one
    before it: what is not the command's own is left in ``context.args`` and :func:`words_after_dashes`.
    """

    module: str
    function: str
    summary: str
    starts_script: bool = False

    def load(self, name: str) -> Any:
        """Import it, and return the command of this name."""
        found = getattr(import_module(self.module), self.function)
        if isinstance(found, typer.Typer):
            return typer.main.get_command(found)
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        settings = {"ignore_unknown_options": True, "allow_extra_args": True} if self.starts_script else None
        app.command(name, context_settings=settings)(found)
        return typer.main.get_command(app)


LAZY_COMMANDS: Final = {
    "run": LazyCommand(
        "launch.commands.run",
        "run",
        "Start a script on all ranks of this node, under torchrun: rankfold run [OPTIONS] -- train.py ARGS",
        starts_script=True,
    ),
    "ls": LazyCommand(
        "launch.commands.ls", "list_runs", "List the runs below a folder, the one written last at the end."
    ),
    "inspect": LazyCommand(
        "launch.commands.inspect", "inspect", "Show identity, layout, sites, coverage, findings and cost of a run."
    ),
    "series": LazyCommand(
        "launch.commands.series", "series", "Show a field of the sites that a name or a glob means, over the steps."
    ),
    "top": LazyCommand(
        "launch.commands.top",
        "top",
        "Show which sites moved most, which are dead, and which hold values that are not finite, by rank.",
    ),
    "watch": LazyCommand(
        "launch.commands.watch", "watch", "Follow a run while it is written, until it is closed or Ctrl-C."
    ),
    "compare": LazyCommand(
        "launch.commands.compare", "compare", "Compare two runs by site and step; exits 3 where they differ."
    ),
    "export": LazyCommand(
        "launch.commands.export",
        "export",
        "Write a record as TensorBoard events, a W&B run, JSON lines, Parquet or CSV.",
    ),
    "status": LazyCommand(
        "launch.commands.status",
        "status",
        "Say how the actors of a run are: health, lag, coverage. Exits 1 where no actor runs.",
    ),
    "verify": LazyCommand(
        "launch.commands.verify",
        "verify",
        "Check every byte of a run, and then what its numbers must satisfy; exits 3 where something is wrong.",
    ),
    "report": LazyCommand(
        "launch.commands.report", "report", "Write a report of a run: one HTML file that needs no network."
    ),
    "render": LazyCommand(
        "launch.commands.render",
        "render_target",
        "Write the file that starts a job on a cluster: Slurm, Kubernetes, KubeRay, or an image for them.",
    ),
    "gate": LazyCommand("launch.commands.gate", "gate", "List, run and report the acceptance gates of a cluster."),
}


class LazyGroup(TyperGroup):
    """A group that has ``LAZY_COMMANDS`` beside the commands that were added to it."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return all names."""
        return [*super().list_commands(ctx), *LAZY_COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command to be listed; one that is lazy has its summary alone."""
        if cmd_name in LAZY_COMMANDS:
            return TyperCommand(cmd_name, help=LAZY_COMMANDS[cmd_name].summary)
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the words call, imported now."""
        if not args or args[0] not in LAZY_COMMANDS:
            return super().resolve_command(ctx, args)
        name, words = args[0], args[1:]
        lazy = LAZY_COMMANDS[name]
        if lazy.starts_script and "--" in words:
            end = words.index("--")
            ctx.meta[_SCRIPT] = words[end + 1 :]
            words = words[:end]
        return name, lazy.load(name), words


def words_after_dashes(context: typer.Context) -> list[str]:
    """Return the words after ``--`` of a command that starts a script."""
    return list(context.meta.get(_SCRIPT, ()))
