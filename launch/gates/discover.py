"""The gates that there are: every file of ``cluster/gates`` that declares one."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.cluster_folder import cluster_folder
from launch.gates.spec import Gate
from launch.gates.trial import Trial
from telemetry.errors import ConfigurationError

__all__ = ["GateFile", "find_gates", "gates_named"]


@dataclass(frozen=True)
class GateFile:
    """A gate, its file, and the function that carries it out and returns measured values by the names of its limits.

    A value that is None was not measured. Values under other names are kept in the verdict as notes.
    """

    gate: Gate
    file: Path
    run: Callable[[Trial], Mapping[str, object]]


def find_gates(folder: Path | None = None) -> list[GateFile]:
    """Return all gates by name; ``folder`` is that of this installation if None."""
    files = sorted((folder or cluster_folder() / "gates").glob("*.py"))
    return [_load(file) for file in files]


def gates_named(names: Sequence[str]) -> list[GateFile]:
    """Return the gates of these names, each once; ``all`` means all of them.

    Raises:
        ConfigurationError: there is none of one of the names.
    """
    gates = {found.gate.name: found for found in find_gates()}
    wanted = dict.fromkeys(one for name in names for one in (gates if name == "all" else [name]))
    for name in wanted:
        if name not in gates:
            raise ConfigurationError(f"there is no gate {name!r}", remedy=f"name one of {', '.join(gates)}, or all")
    return [gates[name] for name in wanted]


def _load(file: Path) -> GateFile:
    name = f"rankfold_gate_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, "a file that ends in .py has a loader"
    assert spec.loader is not None, "a file that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return GateFile(module.GATE, file, module.run)
