"""What a job on a cluster is, whatever starts it there."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from telemetry.errors import ConfigurationError

__all__ = ["LaunchSpec"]

_MARGIN_S: Final = 30
# A Service wants a letter first (RFC 1035 in RFC 1123), and KubeRay adds 16 characters to the name of a RayJob.
_NAME: Final = re.compile(r"[a-z]([a-z0-9-]{0,45}[a-z0-9])?")
_NAMESPACE: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_CLAIM: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORD: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_IMAGE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")
_INTERFACES: Final = re.compile(r"[\^=]?[A-Za-z0-9][A-Za-z0-9._:,@-]*")
_RESOURCE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_MINIMA: Final = {
    "num_nodes": 1,
    "gpus_per_node": 0,
    "ranks_per_node": 1,
    "cpus_per_node": 1,
    "memory_gib": 1,
    "shm_gib": 1,
    "port": 1024,
    "max_restarts": 0,
    "max_requeues": 0,
    "grace_s": 1,
    "time_limit_min": 1,
    "num_legs": 2,
    "rdma_count": 1,
}
_PATTERNS: Final = {
    "name": _NAME,
    "partition": _WORD,
    "account": _WORD,
    "qos": _WORD,
    "namespace": _NAMESPACE,
    "claim": _CLAIM,
    "image": _IMAGE,
    "network_interface": _INTERFACES,
    "rdma_resource": _RESOURCE,
}


@dataclass(frozen=True)
class LaunchSpec:
    """One job, checked on construction; a field that is None is left to the cluster.

    Attributes:
        name: lowercase letters, digits and ``-``, 47 characters at most, a letter first: every target takes it.
        num_nodes: nodes, each with one ``rankfold run``.
        to: run directory, absolute, on storage that every node sees.
        script, arguments: what every rank runs.
        gpus_per_node: GPUs, one a rank; 0 trains on CPUs.
        ranks_per_node: processes on a node; ``gpus_per_node`` if None, or 1 where that is 0.
        cpus_per_node, memory_gib: of a node, for all of its ranks.
        shm_gib: size of ``/dev/shm`` on Kubernetes, a part of the memory; as much as there is if None.
        port: of the rendezvous, on the first node.
        max_restarts: times that the ranks are started again on the nodes that are there.
        max_requeues: times that the scheduler starts the job, or on Kubernetes a pod, again.
        grace_s: seconds that ranks have between a notice to end and the kill.
        time_limit_min: minutes that the job may take.
        num_legs: length of a Slurm array whose tasks run one after the other, each continuing from the checkpoint.
        partition, account, qos: of Slurm.
        image, namespace, claim, mount_path: of Kubernetes; ``claim`` is the volume claim that is mounted there.
        network_interface: for NCCL and gloo, such as ``eth0``.
        rdma_resource, rdma_count: name and number of a device resource on Kubernetes, such as ``rdma/ib``.
        env: variables of the ranks.

    Raises:
        ConfigurationError: a field has a value that cannot work.

    Example:
        >>> spec = LaunchSpec("exp1", 2, "/shared/runs/exp1", "train.py", ("--lr", "1e-3"))
        >>> spec.num_ranks_per_node
        8
    """

    name: str
    num_nodes: int
    to: str
    script: str
    arguments: tuple[str, ...] = ()
    gpus_per_node: int = 8
    ranks_per_node: int | None = None
    cpus_per_node: int | None = None
    memory_gib: int | None = None
    shm_gib: int | None = None
    port: int = 29400
    max_restarts: int = 3
    max_requeues: int = 10
    grace_s: int = 60
    time_limit_min: int | None = None
    num_legs: int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    image: str | None = None
    namespace: str = "default"
    claim: str | None = None
    mount_path: str = "/shared"
    network_interface: str | None = None
    rdma_resource: str | None = None
    rdma_count: int = 1
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, minimum in _MINIMA.items():
            value = getattr(self, name)
            _require(value is None or value >= minimum, f"{name} is {value}", f"give {minimum} or more")
        for name, pattern in _PATTERNS.items():
            value = getattr(self, name)
            _require(
                value is None or pattern.fullmatch(value),
                f"{name} is {value!r}",
                f"give one that matches {pattern.pattern}",
            )
        _require(self.port < 1 << 16, f"port is {self.port}", "give one below 65536")
        self._require_text()
        self._require_paths()
        self._require_sizes()

    def _require_text(self) -> None:
        for name, value in self.env.items():
            _require(_VARIABLE.fullmatch(name), f"{name!r} is no name of a variable", "write NAME=VALUE")
            _require(_is_text(value), f"the variable {name} is {value!r}", "give text without a NUL character")
        for word in (self.to, *self.command):
            _require(_is_text(word), f"the command has {word!r}", "give text without a NUL character")

    def _require_paths(self) -> None:
        _require(
            self.script and not self.script.startswith("-"),
            f"the script is {self.script!r}",
            "end the command line with -- SCRIPT ARGUMENTS",
        )
        for name in ("to", "mount_path"):
            path = getattr(self, name)
            _require(
                path.isprintable() and path.startswith("/") and ".." not in path.split("/"),
                f"{name} is {path!r}",
                "give an absolute path, which means the same on every node",
            )
        _require(
            self.claim is None or posixpath.join(self.to, "").startswith(posixpath.join(self.mount_path, "")),
            f"the run directory {self.to} is not on the volume that is mounted at {self.mount_path}",
            f"give a directory below {self.mount_path}, or another mount path",
        )

    def _require_sizes(self) -> None:
        _require(
            not self.gpus_per_node or self.ranks_per_node in (None, self.gpus_per_node),
            f"a node has {self.gpus_per_node} GPUs and {self.ranks_per_node} ranks",
            "leave ranks_per_node out: each GPU has one rank",
        )
        _require(
            self.memory_gib is None or self.shm_gib is None or self.memory_gib > self.shm_gib,
            f"memory_gib is {self.memory_gib}, and shm_gib is {self.shm_gib}",
            "shared memory is a part of the memory: give more of this, or less of that",
        )
        _require(
            self.time_limit_min is None or self.time_limit_min * 60 > self.notice_s,
            f"time_limit_min is {self.time_limit_min}, and the ranks are told {self.notice_s} s before the end",
            "give more time, or a shorter grace_s",
        )

    @property
    def num_ranks_per_node(self) -> int:
        """Processes that torchrun starts on each node."""
        return self.ranks_per_node or self.gpus_per_node or 1

    @property
    def command(self) -> tuple[str, ...]:
        """The script and its arguments."""
        return (self.script, *self.arguments)

    @property
    def notice_s(self) -> int:
        """Seconds between the notice to end and the kill by the scheduler, which has to find the ranks gone."""
        return self.grace_s + _MARGIN_S

    @property
    def folder(self) -> str:
        """Folder of the script, as the script is given."""
        return posixpath.dirname(self.script) or "."

    @property
    def variables(self) -> dict[str, str]:
        """``env``, and what ``network_interface`` means for NCCL and gloo; ``env`` has precedence."""
        names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if self.network_interface else ()
        return {**{name: str(self.network_interface) for name in names}, **self.env}


def _require(holds: object, message: str, remedy: str) -> None:
    if not holds:
        raise ConfigurationError(message, remedy=remedy)


def _is_text(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in word
