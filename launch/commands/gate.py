"""``rankfold gate``: the acceptance gates of a cluster, listed, run and reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from launch.commands.shared import EXIT_FOUND, JsonOption, console, in_words, plain_table, print_json
from launch.gates import Gate, Verdict
from launch.gates.discover import GateFile, find_gates, gates_named
from launch.gates.results import clear_results, read_verdicts, refuse_earlier_results
from launch.gates.runner import RunOptions, impossible, lacking, run_gate
from launch.gates.stopping import Stopped, stop_on_signals
from telemetry.errors import ConfigurationError

__all__ = ["gate", "list_gates", "report_gates", "run_gates"]

gate = typer.Typer(
    name="gate",
    help="List, run and report the acceptance gates of a cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@gate.command("list")
def list_gates(as_json: JsonOption = False) -> None:
    """List the gates: what each proves, what it needs, and whether it would run or be rehearsed here."""
    rows = [_listed(found.gate) for found in find_gates()]
    if as_json:
        print_json(rows)
        return
    names = ("gate", "here", "needs", "proves")
    shown = [(row["name"], row["here"], row["needs_in_words"], row["purpose"]) for row in rows]
    console().print(plain_table("", names, shown))
    for row in rows:
        if row["why"]:
            typer.echo(f"{row['name']}: {row['here']}, because {row['why']}")


def _listed(gate: Gate) -> dict[str, object]:
    reason, unmet = impossible(gate), lacking(gate)
    return {
        "name": gate.name,
        "here": "not run" if reason else "rehearsal" if unmet else "real",
        "why": reason or unmet,
        "needs": asdict(gate.needs),
        "needs_in_words": _needs(gate),
        "purpose": gate.purpose,
        "procedure": gate.procedure,
        "rehearsal": gate.rehearsal,
        "limits": [asdict(limit) for limit in gate.limits],
        "deadline_s": gate.deadline_s,
    }


def _needs(gate: Gate) -> str:
    needs = gate.needs
    words = [f"{needs.num_nodes} nodes"] if needs.num_nodes > 1 else []
    words += (
        [f"{needs.gpus_per_node} GPU{'s' if needs.gpus_per_node > 1 else ''} a node"] if needs.gpus_per_node else []
    )
    return ", ".join([*words, *needs.modules]) or "nothing"


@gate.command("run")
def run_gates(
    out: Annotated[Path, typer.Option(help="Folder of the verdicts; on several nodes one that they share.")],
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Gates, all by default.")] = None,
    rehearse: Annotated[bool, typer.Option("--rehearse", help="Leave GPUs alone: gloo on the CPU.")] = False,
    no_rehearsal: Annotated[
        bool, typer.Option("--no-rehearsal", help="Do not run what this machine could only rehearse.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace earlier results of these gates.")] = False,
    num_ranks: Annotated[
        int | None, typer.Option("--nproc-per-node", min=1, help="Ranks on this node: one a GPU, 2 in a rehearsal.")
    ] = None,
    num_nodes: Annotated[int, typer.Option("--nnodes", min=1, help="Nodes; each runs this command.")] = 1,
    node_rank: Annotated[int, typer.Option("--node-rank", min=0, help="Number of this node, from 0.")] = 0,
    endpoint: Annotated[str, typer.Option("--rdzv-endpoint", help="HOST:PORT on node 0 where the nodes meet.")] = "",
) -> None:
    """Run gates and write a verdict on each; exits 3 where one failed, or none was run."""
    _require_consistent(num_nodes, node_rank, endpoint, force, rehearse and no_rehearsal)
    gates = gates_named(names or ["all"])
    all_names = [found.gate.name for found in gates]
    if force:
        clear_results(out, all_names)
    elif node_rank == 0:
        refuse_earlier_results(out, all_names)
    options = RunOptions(out, rehearse, num_ranks, num_nodes, node_rank, endpoint, not no_rehearsal)
    with stop_on_signals():
        try:
            verdicts = [_run_one(found, options, f"{i} of {len(gates)}") for i, found in enumerate(gates, 1)]
        except Stopped as stopped:
            typer.echo(f"{stopped}; the verdicts until then are in {out}", err=True)
            raise typer.Exit(128 + stopped.number) from stopped
    _conclude(verdicts)


def _require_consistent(num_nodes: int, node_rank: int, endpoint: str, force: bool, contradicts: bool) -> None:
    """Refuse options that do not go together.

    Raises:
        ConfigurationError: they do not.
    """
    if num_nodes > 1 and not endpoint:
        raise ConfigurationError(f"{num_nodes} nodes have no place to meet", remedy="give --rdzv-endpoint HOST:PORT")
    if node_rank >= num_nodes:
        raise ConfigurationError(
            f"node {node_rank} is none of {num_nodes} nodes", remedy="give --nnodes, and --node-rank from 0"
        )
    if num_nodes > 1 and force:
        raise ConfigurationError(
            "several nodes cannot agree on when earlier results are removed", remedy="name another --out"
        )
    if contradicts:
        raise ConfigurationError("--rehearse and --no-rehearsal contradict each other", remedy="leave one out")


def _run_one(found: GateFile, options: RunOptions, position: str) -> Verdict:
    err = Console(stderr=True, highlight=False)
    what = f"{found.gate.name} ({position}, at most {found.gate.deadline_s:.0f} s)"
    if not err.is_terminal:
        err.print(what)
    with err.status(what) if err.is_terminal else nullcontext():
        verdict = run_gate(found, options)
    for line in _lines(verdict):
        console().print(line, markup=False)
    return verdict


def _lines(verdict: Verdict) -> Sequence[str]:
    """Say how a gate ended: one line, one for each limit, and one for the reason."""
    mode = " in rehearsal" if verdict.mode == "rehearsal" and verdict.verdict != "not_run" else ""
    lines = [f"{in_words(verdict.verdict).replace('_', ' ')}{mode}: {verdict.gate}, {verdict.duration_s:.1f} s"]
    for row in verdict.measured:
        mark = "not judged" if not row.is_judged else "holds" if row.holds else "BROKEN"
        lines.append(
            f"  {row.name}: {in_words(row.value)}, {row.comparison} {row.bound:g} {row.unit}".rstrip() + f": {mark}"
        )
    return [*lines, f"  {verdict.reason}"] if verdict.reason else lines


@gate.command("report")
def report_gates(
    out: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder given to `gate run` as --out.", show_default=False)
    ],
    as_json: JsonOption = False,
) -> None:
    """Show the verdicts of a folder with every limit; exits 3 where one failed, or no gate was run."""
    verdicts = read_verdicts(out)
    if as_json:
        print_json([asdict(verdict) for verdict in verdicts])
    else:
        names = ("gate", "verdict", "mode", "quantity", "value", "limit", "holds")
        console().print(
            plain_table("", names, [row for verdict in verdicts for row in _rows(verdict)], right=("value",))
        )
        for verdict in verdicts:
            if verdict.reason:
                typer.echo(f"{verdict.gate}: {verdict.reason}")
    _conclude(verdicts, quietly=as_json)


def _rows(verdict: Verdict) -> list[tuple[object, ...]]:
    head = (verdict.gate, verdict.verdict.replace("_", " "), verdict.mode)
    if not verdict.measured:
        return [(*head, "", "", "", "")]
    rows: list[tuple[object, ...]] = []
    for index, row in enumerate(verdict.measured):
        limit = f"{row.comparison} {row.bound:g} {row.unit}".rstrip()
        holds = row.holds if row.is_judged else "not judged"
        rows.append((*(head if index == 0 else ("", "", "")), row.name, row.value, limit, holds))
    return rows


def _conclude(verdicts: Sequence[Verdict], *, quietly: bool = False) -> None:
    """Print the totals, and exit with the answer."""
    count = Counter(verdict.verdict for verdict in verdicts)
    rehearsed = sum(verdict.mode == "rehearsal" and verdict.verdict == "passed" for verdict in verdicts)
    if not quietly:
        note = f" ({rehearsed} in rehearsal, which says nothing about this cluster)" if rehearsed else ""
        typer.echo(f"{count['passed']} passed{note}, {count['failed']} failed, {count['not_run']} not run")
    if count["failed"] or not count["passed"]:
        raise typer.Exit(EXIT_FOUND)
