"""A user's own script under torchrun: the command and the environment that its ranks need for one record.

Nothing is imported into the ranks. What telemetry has to know reaches them by environment, and a script that torchrun
starts without any of this works as well.
"""

from __future__ import annotations

import os
import secrets
import shlex
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Final, NoReturn

__all__ = ["Job", "plan_job"]

_BACKEND: Final = "rankfold"
# Options of torchrun that take no value: what follows them is not theirs.
_SWITCHES: Final = ("--standalone", "-m", "--module", "--no-python", "--run-path", "--virtual-local-rank")


@dataclass(frozen=True)
class Job:
    """What is started on one node.

    Attributes:
        command: torchrun with its options, the script and the script's arguments.
        changes: variables that are added to the environment, each with its value.
    """

    command: tuple[str, ...]
    changes: Mapping[str, str]

    def environment(self) -> dict[str, str]:
        """Return the whole environment of the command."""
        return {**os.environ, **self.changes}

    def __str__(self) -> str:
        """Return a line for a shell that does the same, but for the supervision."""
        return "\n".join([*(f"export {name}={shlex.quote(value)}" for name, value in self.changes.items())]) + (
            f"\n{shlex.join(self.command)}"
        )


def plan_job(
    options: Sequence[str],
    script: Sequence[str],
    *,
    to: str = "",
    job: str = "",
    num_threads: int | None = None,
    grace_s: float | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Job:
    """Say how to start a script.

    Args:
        options: for torchrun, passed on as they are; those that concern the rendezvous are added where they are left
            out, and not if they ask for a rendezvous of another kind.
        script: the script and its arguments.
        to: destination of the record, "" to leave it to the script.
        job: name that is unique to this job over all its restarts, by whoever does them; the job of Slurm if "".
        num_threads: of each rank; if None, that of the environment, or else the cores shared by the ranks of the node.
        grace_s: seconds that torchrun leaves its ranks between SIGTERM and SIGKILL; as torchrun says if None.
        environ: the environment, in which ``PET_…`` are options of torchrun.

    Raises:
        ConfigurationError: there is no script.
    """
    given = _Given(options, environ)
    _require_script(given, script)
    changes = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    if to:
        changes["RANKFOLD_TO"] = to
    if job := job or environ.get("RANKFOLD_JOB", "") or _slurm_job(environ):
        changes["RANKFOLD_JOB"] = job
    if grace_s is not None and "--shutdown-timeout" not in given:
        changes["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(ceil(grace_s))
    if num_threads is not None:
        changes["OMP_NUM_THREADS"] = str(num_threads)
    elif not environ.get("OMP_NUM_THREADS"):
        changes["OMP_NUM_THREADS"] = str(_threads(given.value("--nproc-per-node") or "1"))
    # Not -m: that would put the working directory on the path of the agent, where a file of the user's may hide ours.
    torchrun = Path(sysconfig.get_path("scripts"), "torchrun")
    start = [str(torchrun)] if torchrun.exists() else [sys.executable, "-m", "torch.distributed.run"]
    words = [word for word in options if word != "--standalone"]
    # Behind the user's, of which c10d is one that ours is, too: the last one counts.
    return Job((*start, *words, *_rendezvous(given, job), *script), changes)


class _Given:
    """The options of torchrun that the user has given, on the command line or by environment."""

    def __init__(self, words: Sequence[str], environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._values: dict[str, str] = {}
        index = 0
        while index < len(words):
            name, equals, value = words[index].partition("=")
            name = name.replace("_", "-")
            index += 1
            if not equals and name not in _SWITCHES and index < len(words):
                value = words[index]
                index += 1
            self._values[name] = value

    def __contains__(self, name: str) -> bool:
        return name in self._values or self._variable(name) in self._environ

    def value(self, name: str) -> str:
        return self._values.get(name) or self._environ.get(self._variable(name), "")

    @staticmethod
    def _variable(name: str) -> str:
        return f"PET_{name.strip('-').replace('-', '_').upper()}"


def _rendezvous(given: _Given, job: str) -> list[str]:
    """Return the options of the rendezvous that are left out."""
    if given.value("--rdzv-backend") not in ("", _BACKEND, "c10d"):
        return []
    words = ["--rdzv-backend", _BACKEND]
    several = given.value("--nnodes") not in ("", "1", "1:1") and "--standalone" not in given
    if not several:
        # An address of this machine, because the name of a laptop or container often does not resolve.
        words += ["--rdzv-endpoint", "localhost:0"] if "--rdzv-endpoint" not in given else []
        words += ["--local-addr", "localhost"] if "--local-addr" not in given else []
        words += ["--rdzv-id", secrets.token_hex(8)] if "--rdzv-id" not in given else []
        return words
    if "--rdzv-endpoint" not in given:
        address = given.value("--master-addr")
        if not address:
            _refuse(
                "several nodes, and no place where they meet",
                "give the same --rdzv-endpoint HOST:PORT on every node, HOST being one of them",
            )
        words += ["--rdzv-endpoint", f"{address}:{given.value('--master-port') or 29500}"]
    return words + (["--rdzv-id", job] if job and "--rdzv-id" not in given else [])


def _require_script(given: _Given, script: Sequence[str]) -> None:
    if not script:
        _refuse("no script was given", "rankfold run [OPTIONS] -- train.py ARGS")
    is_file = not any(name in given for name in ("-m", "--module", "--no-python"))
    if is_file and not Path(script[0]).is_file():
        _refuse(f"there is no script {script[0]}", "give its path, or -m before the -- and the name of a module")


def _slurm_job(environ: Mapping[str, str]) -> str:
    job = environ.get("SLURM_JOB_ID", "")
    return f"slurm-{job}" if job else ""


def _threads(ranks: str) -> int:
    if not ranks.isdecimal():
        from torch.distributed.run import determine_local_world_size

        try:
            ranks = str(determine_local_world_size(ranks))
        except (ValueError, RuntimeError) as error:
            _refuse(f"--nproc-per-node is {ranks}: {error}", "give a number")
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, num_cores // max(1, int(ranks)))


def _refuse(text: str, remedy: str) -> NoReturn:
    # Imported for this alone: it loads torch, which takes longer than torchrun needs to start.
    from telemetry.errors import ConfigurationError

    raise ConfigurationError(text, remedy=remedy)
