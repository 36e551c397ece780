"""Two hosts on one machine, with a link between them that can be cut and mended.

Each host is a network namespace with a host name and an ``/etc/hosts`` of its own. The link runs through a third
namespace that forwards between them. A cut stops the forwarding: packets then vanish in silence both ways, as they do
behind a switch that died, and no host sees its interface go down.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final
from uuid import uuid4

from launch.gates.spec import NotRunError

__all__ = ["Host", "TwoHosts", "two_hosts"]

_CALL_S: Final = 10.0
_FORWARDING: Final = "/proc/sys/net/ipv4/ip_forward"
# Only inside the namespaces, so that any number of pairs can use the same.
_SUBNETS: Final = ("10.211.1", "10.211.2")
# Runs inside the namespaces, and becomes the command: its process id is the one that the caller gets.
_BECOME: Final = "import os, socket, sys; socket.sethostname(sys.argv[1]); os.execvp(sys.argv[2], sys.argv[2:])"


@dataclass(frozen=True)
class Host:
    """One of the hosts.

    Attributes:
        name: host name, which both hosts resolve, and the name of the network namespace.
        address: IPv4 address on the link.
    """

    name: str
    address: str

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdout: IO[Any] | int | None = None,
        stderr: IO[Any] | int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a command on this host, in a session of its own; it ends with :func:`two_hosts` at the latest.

        Args:
            command: program and arguments.
            env: the whole environment, that of this process if None.
            stdout, stderr: as ``subprocess.Popen`` takes them.
        """
        words = ["ip", "netns", "exec", self.name, "unshare", "--uts", sys.executable, "-c", _BECOME, self.name]
        return subprocess.Popen(
            [*words, *command],
            env=None if env is None else dict(env),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )


@dataclass(frozen=True)
class TwoHosts:
    """Two hosts and their link.

    Attributes:
        first, second: the hosts.
        router: name of the namespace between them.
    """

    first: Host
    second: Host
    router: str

    @property
    def cut_command(self) -> str:
        """For a shell of root, on this machine or on one of the hosts."""
        return f"ip netns exec {self.router} sh -c 'echo 0 > {_FORWARDING}'"

    @property
    def mend_command(self) -> str:
        """As ``cut_command``."""
        return self.cut_command.replace("echo 0", "echo 1")

    def cut(self) -> None:
        """Drop whatever comes over the link from now on, both ways and in silence."""
        _call("sh", "-c", self.cut_command)

    def mend(self) -> None:
        """Forward again."""
        _call("sh", "-c", self.mend_command)


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Set up two hosts with a link, and take them away with all their processes.

    Raises:
        NotRunError: this machine cannot: not Linux, no iproute2, or not root.
    """
    _require_possible()
    base = f"rankfold-{uuid4().hex[:8]}"
    first, second = (Host(f"{base}-{letter}", f"{subnet}.2") for letter, subnet in zip("ab", _SUBNETS, strict=True))
    pair = TwoHosts(first, second, router=f"{base}-r")
    with ExitStack() as undo:
        for name in (first.name, second.name, pair.router):
            undo.callback(_remove, name)
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        for host, subnet in zip((first, second), _SUBNETS, strict=True):
            _connect(host, pair.router, subnet)
            _tell_names(host, pair)
        pair.mend()
        yield pair


def _require_possible() -> None:
    for program in ("ip", "unshare"):
        if shutil.which(program) is None:
            raise NotRunError(f"{program} is not there: network namespaces need Linux with iproute2 and util-linux")
    if os.geteuid() != 0:
        raise NotRunError("network namespaces need root, and this is not root")


def _connect(host: Host, router: str, subnet: str) -> None:
    port = f"port-{host.name[-1]}"
    _ip("link", "add", port, "netns", router, "type", "veth", "peer", "name", "eth0", "netns", host.name)
    for namespace, interface, address in ((router, port, f"{subnet}.1"), (host.name, "eth0", host.address)):
        _ip("-n", namespace, "address", "add", f"{address}/24", "dev", interface)
        _ip("-n", namespace, "link", "set", interface, "up")
    _ip("-n", host.name, "route", "add", "default", "via", f"{subnet}.1")


def _tell_names(host: Host, pair: TwoHosts) -> None:
    """Write what ``ip netns exec`` puts in the place of ``/etc/hosts``."""
    folder = _settings_of(host.name)
    folder.mkdir(parents=True)
    rows = [f"{one.address} {one.name}" for one in (pair.first, pair.second)]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *rows, ""]))


def _settings_of(namespace: str) -> Path:
    return Path("/etc/netns") / namespace


def _remove(namespace: str) -> None:
    """Kill what runs in a namespace, then take it away; also one that was never made."""
    _kill_all(namespace)
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, timeout=_CALL_S)
    shutil.rmtree(_settings_of(namespace), ignore_errors=True)


def _kill_all(namespace: str) -> None:
    deadline = time.monotonic() + _CALL_S
    while pids := _pids(namespace):
        if time.monotonic() > deadline:
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)


def _pids(namespace: str) -> list[int]:
    listing = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, timeout=_CALL_S)
    return [int(word) for word in listing.stdout.split()]


def _ip(*words: str) -> None:
    _call("ip", *words)


def _call(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=_CALL_S)
    if done.returncode != 0:
        raise NotRunError(f"`{' '.join(words)}` was refused: {done.stderr.strip()}")
