"""Run a gate on this node and write its verdict."""

from __future__ import annotations

import importlib.util
import platform
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch

from launch.gates.discover import GateFile
from launch.gates.results import verdict_file
from launch.gates.spec import Gate, NotRunError
from launch.gates.trial import Trial
from launch.gates.verdict import Verdict, judge

__all__ = ["RunOptions", "impossible", "lacking", "run_gate"]

_RANKS_ON_CPU: Final = 2


@dataclass(frozen=True)
class RunOptions:
    """How gates are run on this node.

    Attributes:
        out: folder of the verdicts, the same on all nodes; rehearse: whether GPUs are left alone.
        num_ranks: on this node, None for one a GPU; num_nodes, node_rank, endpoint: see :class:`Trial`.
        may_rehearse: whether a gate whose needs are not met is rehearsed; else it is not run.
    """

    out: Path
    rehearse: bool = False
    num_ranks: int | None = None
    num_nodes: int = 1
    node_rank: int = 0
    endpoint: str = ""
    may_rehearse: bool = True


def run_gate(found: GateFile, options: RunOptions) -> Verdict:
    """Carry out one gate and write ``OUT/NAME.json`` on the first node; call from the main thread.

    Whatever the gate raises becomes its verdict, but for a signal, after which there is none.
    """
    gate = found.gate
    folder = options.out / gate.name
    folder.mkdir(parents=True, exist_ok=True)
    unmet = lacking(gate, options.num_nodes)
    is_rehearsal = options.rehearse or bool(unmet)
    started, began = datetime.now(timezone.utc), time.monotonic()
    blank = Verdict(
        gate=gate.name,
        verdict="not_run",
        reason=unmet,
        mode="rehearsal" if is_rehearsal else "cluster",
        purpose=gate.purpose,
        proves=gate.rehearsal if is_rehearsal else gate.purpose,
        machine=_machine(options),
        started_at=started.isoformat(timespec="seconds"),
    )
    reason = impossible(gate)
    if reason or (unmet and not options.may_rehearse):
        verdict = replace(blank, reason=reason or unmet)
    else:
        trial = Trial(
            file=found.file,
            out=folder,
            is_rehearsal=is_rehearsal,
            num_ranks=options.num_ranks or (0 if is_rehearsal else torch.cuda.device_count()) or _RANKS_ON_CPU,
            num_nodes=options.num_nodes,
            node_rank=options.node_rank,
            endpoint=options.endpoint,
            deadline=time.monotonic() + gate.deadline_s,
        )
        verdict = _carry_out(found, trial, blank)
    verdict = replace(verdict, duration_s=round(time.monotonic() - began, 3))
    if options.node_rank == 0:
        verdict.write(verdict_file(options.out, gate.name))
    return verdict


def _carry_out(found: GateFile, trial: Trial, blank: Verdict) -> Verdict:
    try:
        values = dict(found.run(trial))
    except NotRunError as error:
        return replace(blank, reason=str(error))
    except Exception as error:
        return replace(blank, verdict="failed", reason=f"{type(error).__name__}: {error}")
    names = {limit.name for limit in found.gate.limits}
    there = {name for name in names & values.keys() if values[name] is not None}
    measured = {name: float(values[name]) for name in there}  # type: ignore[arg-type]
    notes: Mapping[str, Any] = {name: value for name, value in values.items() if name not in names}
    state, reason, rows = judge(found.gate, measured, is_rehearsal=trial.is_rehearsal)
    return replace(blank, verdict=state, reason=reason, measured=rows, notes=notes)


def lacking(gate: Gate, num_nodes: int = 1) -> str:
    """Say what this machine lacks to prove the gate's point, so that it could be rehearsed only; "" if nothing."""
    num_gpus = torch.cuda.device_count()
    if num_gpus < gate.needs.gpus_per_node:
        return f"this node has {num_gpus} GPUs, the gate needs {gate.needs.gpus_per_node}"
    if num_nodes < gate.needs.num_nodes:
        return f"the job has {num_nodes} nodes, the gate needs {gate.needs.num_nodes}"
    return ""


def impossible(gate: Gate) -> str:
    """Say why the gate can be neither run nor rehearsed here, and how to change that; "" if it can."""
    if gate.pending:
        return gate.pending
    for module, remedy in gate.needs.modules.items():
        try:
            is_there = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            is_there = False
        if not is_there:
            return f"{module} is not installed: {remedy}"
    return ""


def _machine(options: RunOptions) -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "num_nodes": options.num_nodes,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "rankfold": version("rankfold"),
    }
