"""Which attempt of which job this process is, as its launcher tells it, so that a restart finds its run again.

A job that is restarted before its first checkpoint begins at its first step once more, and asks for a new run in a
directory that its own earlier attempt has used. That is no mistake, and only the launcher's counters can tell.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["ATTEMPT_VARIABLE", "JOB_VARIABLE", "NONCE_VARIABLE", "continues", "current_attempt"]

# Set by the agents of ``rankfold run``, equally on all nodes.
JOB_VARIABLE: Final = "RANKFOLD_JOB"
ATTEMPT_VARIABLE: Final = "RANKFOLD_ATTEMPT"
NONCE_VARIABLE: Final = "RANKFOLD_NONCE"


def current_attempt() -> dict[str, Any] | None:
    """Return ``job`` (equal for all attempts) and ``restarts`` (counts, the outer launcher's first); None without one.

    Read from ``RANKFOLD_JOB``, ``RANKFOLD_ATTEMPT`` and ``RANKFOLD_NONCE``, which all nodes have agreed on, and where
    these are not set from ``SLURM_JOB_ID``, ``TORCHELASTIC_RUN_ID`` and ``TORCHELASTIC_RESTART_COUNT``; and from
    ``SLURM_RESTART_COUNT``. A run id of torchrun that its user has not chosen is told apart by the node and the
    process of its agent.
    """
    outer = _count("SLURM_RESTART_COUNT")
    if (job := os.environ.get(JOB_VARIABLE)) and ATTEMPT_VARIABLE in os.environ:
        agreed = {"job": [None, job], "restarts": [outer, _count(ATTEMPT_VARIABLE)]}
        return {**agreed, "nonce": os.environ.get(NONCE_VARIABLE, "")}
    slurm, elastic = os.environ.get("SLURM_JOB_ID"), os.environ.get("TORCHELASTIC_RUN_ID")
    if slurm is None and elastic is None:
        return None
    if slurm is None and elastic == "none":
        elastic = f"{socket.gethostname()}:{os.getppid()}"
    return {"job": [slurm, elastic], "restarts": [outer, _count("TORCHELASTIC_RESTART_COUNT")]}


def _count(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else 0


def continues(now: Mapping[str, Any] | None, before: Mapping[str, Any] | None) -> bool:
    """Tell whether ``now`` is a later attempt of the same job as ``before``."""
    if now is None or before is None:
        return False
    return bool(now["job"] == before["job"] and list(now["restarts"]) > list(before["restarts"]))
