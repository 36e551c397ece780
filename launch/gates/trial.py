"""What a gate is given: the machine it runs on, a folder of its own, and a way to start its ranks."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from launch.gates.stopping import Stopped
from launch.job import plan_job
from launch.process import ENDING_SIGNALS, EXIT_LATE, run_supervised

__all__ = ["RanksFailedError", "Trial"]

RESULT_VARIABLE: Final = "RANKFOLD_GATE_RESULT"
# An NFS client may go on believing for a minute that a file is not there.
_SHOWN_WITHIN_S: Final = 70.0
_POLL_S: Final = 0.2


class RanksFailedError(Exception):
    """The ranks of a gate did not end well; the text holds the exit code and the end of their output."""


@dataclass(frozen=True)
class Trial:
    """One gate on one node of the cluster. Every node runs the same procedure; rank zero writes what was measured.

    Attributes:
        file: of the gate, started by path as the script of its ranks.
        out: folder of this gate, new; on several nodes on storage that they share.
        is_rehearsal: whether this runs on gloo and the CPU because ``needs`` are not met.
        num_ranks: ranks on this node: one for each GPU, or two in a rehearsal, unless the user said otherwise.
        num_nodes, node_rank, endpoint: of the job; ``endpoint`` is HOST:PORT of the rendezvous, "" on one node.
        deadline: monotonic time at which the gate has failed.
    """

    file: Path
    out: Path
    is_rehearsal: bool
    num_ranks: int
    num_nodes: int = 1
    node_rank: int = 0
    endpoint: str = ""
    deadline: float = field(default_factory=lambda: time.monotonic() + 300.0)

    @property
    def backend(self) -> str:
        """Of ``torch.distributed``."""
        return "gloo" if self.is_rehearsal else "nccl"

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline, at least one."""
        return max(1.0, self.deadline - time.monotonic())

    def command(
        self,
        arguments: Sequence[str],
        num_ranks: int | None = None,
        name: str = "ranks",
        options: Sequence[str] = (),
    ) -> list[str]:
        """Return the command that starts the ranks of this node with the gate's own file as their script.

        Args:
            arguments: for the script.
            num_ranks: on this node, ``self.num_ranks`` if None.
            name: of this run; nodes meet by it.
            options: further ones of torchrun.
        """
        words = ["--nproc-per-node", str(num_ranks or self.num_ranks)]
        if self.num_nodes > 1:
            words += ["--nnodes", str(self.num_nodes), "--rdzv-endpoint", self.endpoint]
            words += ["--rdzv-id", f"{self.file.stem}-{name}"]
        return list(plan_job([*words, *options], [str(self.file), *arguments], num_threads=1, environ={}).command)

    def environment(self, name: str = "ranks") -> dict[str, str]:
        """Return the environment of the ranks: no setting of the user's shell may change what is measured."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("RANKFOLD_")}
        return {"OMP_NUM_THREADS": "1", **kept, RESULT_VARIABLE: str(self.result_file(name))}

    def result_file(self, name: str = "ranks") -> Path:
        """Where rank zero of a run writes what it measured."""
        return self.out / f"{name}.json"

    def run_ranks(
        self,
        arguments: Sequence[str] = (),
        *,
        name: str = "ranks",
        num_ranks: int | None = None,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Run the gate's file on all ranks to their end and return what rank zero wrote with ``write_result``.

        Args:
            arguments: for the script.
            name: of this run, for its files; a gate may start several.
            num_ranks: on this node, ``self.num_ranks`` if None.
            env: added to the environment.
            options: further ones of torchrun.

        Raises:
            RanksFailedError: they ended with an error, late, or without a result.
            Stopped: a signal came.
        """
        log = self._log(name)
        with log.open("wb") as output:
            code = run_supervised(
                self.command(arguments, num_ranks, name, options),
                env={**self.environment(name), **(env or {})},
                stdout=output,
                stderr=output,
                limit_s=self.remaining_s,
            )
        if code - 128 in ENDING_SIGNALS:
            raise Stopped(code - 128)
        if code != 0:
            how = "were still running at the deadline" if code == EXIT_LATE else f"ended with {code}"
            raise RanksFailedError(f"the ranks {how}, see {log}: {_tail(log)}")
        return self.result(name)

    def result(self, name: str = "ranks") -> dict[str, Any]:
        """Return what rank zero of a run wrote.

        Raises:
            RanksFailedError: it left no result.
        """
        log = self._log(name)
        try:
            return dict(json.loads(self._result(name)))
        except (OSError, ValueError) as error:
            raise RanksFailedError(f"the ranks left no result, see {log}: {_tail(log)}") from error

    def _log(self, name: str) -> Path:
        return self.out / (f"{name}.log" if self.node_rank == 0 else f"{name}.node{self.node_rank}.log")

    def _result(self, name: str) -> str:
        """Read what rank zero wrote, on whichever node it was; a file system that nodes share may show it late."""
        until = time.monotonic() + (_SHOWN_WITHIN_S if self.num_nodes > 1 else 0.0)
        while not self.result_file(name).exists() and time.monotonic() < min(until, self.deadline):
            time.sleep(_POLL_S)
        return self.result_file(name).read_text()


def _tail(log: Path) -> str:
    """Return the lines of a log that name an error, or its last ones."""
    lines = log.read_text(errors="replace").strip().splitlines()
    named = [line for line in lines if re.search(r"\w(Error|Exception)\b: ", line) and "ChildFailed" not in line]
    return " | ".join(named[:3] or lines[-5:])[:1000]
