"""What can only be checked between nodes: clocks, versions, and whether they see the same storage."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Final, cast

import torch.distributed as dist

from launch.checks import Check, existing_part
from launch.clocks import NUM_PINGS, Offset, offset_to
from telemetry.errors import ConfigurationError

__all__ = ["Meeting", "NodeAbsentError", "check_nodes"]

_LARGE_OFFSET_S: Final = 0.1
_SEEN_WITHIN_S: Final = 5.0
_POLL_S: Final = 0.02
_MARGIN_S: Final = 5.0
_DECISIVE: Final = ("rankfold", "torch")


class NodeAbsentError(Exception):
    """A node did not come, or did not answer; the text says which and for how long."""


@dataclass(frozen=True)
class Meeting:
    """Where the doctors of all nodes meet.

    Attributes:
        node, num_nodes: of this one, and how many there are; node 0 hosts the store.
        endpoint: HOST:PORT of node 0.
        timeout_s: how long each wait may take.
    """

    node: int
    num_nodes: int
    endpoint: str
    timeout_s: float = 60.0

    def open(self) -> Any:
        """Connect to the store of node 0.

        Raises:
            ConfigurationError: the endpoint is none.
            NodeAbsentError: node 0 does not answer.
        """
        host, _, port = self.endpoint.rpartition(":")
        if not host or not port.isdecimal() or not 0 <= self.node < self.num_nodes:
            raise ConfigurationError(
                f"node {self.node} of {self.num_nodes} at {self.endpoint or 'no endpoint'}",
                remedy="give --nnodes N, --node-rank 0 to N-1, and --rdzv-endpoint HOST:PORT, HOST being node 0",
            )
        limit = timedelta(seconds=self.timeout_s)
        try:
            return cast(Any, dist).TCPStore(
                host, int(port), is_master=self.node == 0, timeout=limit, wait_for_workers=False
            )
        except (dist.DistError, RuntimeError) as error:
            raise NodeAbsentError(f"no store at {self.endpoint} within {self.timeout_s:g} s: {error}") from error


def check_nodes(
    meeting: Meeting,
    versions: Mapping[str, str | None],
    run_directory: Path | None,
    clock: Callable[[], float] = time.time,
) -> list[Check]:
    """Compare all nodes. Every node calls this, and every one gets the same checks.

    Args:
        meeting: where.
        versions: of this node's packages.
        run_directory: of the run, to be seen by all nodes; None if it does not matter.
        clock: of this node.

    Raises:
        ConfigurationError: the meeting cannot be as it was described.
    """
    try:
        store = meeting.open()
        _arrive(meeting, store)
        facts: dict[str, Any] = {"host": socket.gethostname(), "versions": dict(versions)}
        with _Token(meeting, store, run_directory) as token:
            if meeting.node == 0:
                _answer(meeting, store, clock)
                _put(store, "facts/0", {**facts, "offset": [0.0, 0.0], "sees": True})
                told = [_get(meeting, store, f"facts/{node}", node) for node in range(meeting.num_nodes)]
                _put(store, "all", told)
            else:
                offset = offset_to(_ask(meeting, store), clock)
                sees = token.is_seen()
                _put(
                    store,
                    f"facts/{meeting.node}",
                    {**facts, "offset": [offset.offset_s, offset.uncertainty_s], "sees": sees},
                )
                told = _get(meeting, store, "all", 0)
            _leave(meeting, store, meeting.num_nodes)
    except NodeAbsentError as error:
        remedy = "start the same command on every node, look at its name and at firewalls, or raise --timeout-s"
        return [Check("nodes", "failed", str(error), remedy)]
    names = [one["host"] for one in told]
    return [
        Check("nodes", "ok", f"{len(names)}: {', '.join(names[:8])}{' …' if len(names) > 8 else ''}"),
        _clock_check(names, [Offset(*one["offset"]) for one in told]),
        *_version_checks(names, [one["versions"] for one in told]),
        *([_storage_check(names, [one["sees"] for one in told])] if run_directory is not None else []),
    ]


def _arrive(meeting: Meeting, store: Any) -> None:
    """Wait for all nodes; node 0 says who is missing, so that every node says the same.

    Raises:
        NodeAbsentError: some did not come.
    """
    _put(store, f"here/{meeting.node}", True)
    if meeting.node == 0:
        ends = time.monotonic() + meeting.timeout_s
        missing = list(range(1, meeting.num_nodes))
        while missing and time.monotonic() < ends:
            time.sleep(_POLL_S)
            missing = [node for node in missing if not store.check([f"here/{node}"])]
        _put(store, "missing", missing)
    # Node 0 may have begun to wait when this one was nearly through.
    store.set_timeout(timedelta(seconds=2 * meeting.timeout_s + _MARGIN_S))
    missing = _get(meeting, store, "missing", 0)
    store.set_timeout(timedelta(seconds=meeting.timeout_s))
    if missing:
        shown = ", ".join(map(str, missing[:16])) + (" …" if len(missing) > 16 else "")
        _leave(meeting, store, meeting.num_nodes - len(missing))
        raise NodeAbsentError(
            f"{len(missing)} of {meeting.num_nodes} nodes did not come within {meeting.timeout_s:g} s: {shown}"
        )


def _clock_check(names: list[str], offsets: list[Offset]) -> Check:
    # What an answer that was slow leaves open is no reason to blame a clock.
    wrong = [i for i, one in enumerate(offsets) if abs(one.offset_s) - one.uncertainty_s > _LARGE_OFFSET_S]
    worst = max(offsets, key=lambda one: abs(one.offset_s))
    text = f"at most {abs(worst.offset_s) * 1e3:.3g} ms ± {worst.uncertainty_s * 1e3:.2g} ms against node 0"
    if not wrong:
        return Check("clocks of the nodes", "ok", text)
    # The clock of node 0 was subtracted: seen from node i, that one is the difference ahead.
    shown = ", ".join(f"{names[i]} by {-offsets[i].offset_s:+.3f} s" for i in wrong[:8])
    remedy = "keep time with chrony or ntpd on every node; times of steps and ages of files are compared between hosts"
    return Check("clocks of the nodes", "warning", f"off against node 0: {shown}", remedy)


def _version_checks(names: list[str], versions: list[dict[str, str | None]]) -> list[Check]:
    checks = []
    for package in versions[0]:
        found = [one.get(package) for one in versions]
        others = [i for i, version in enumerate(found) if version != found[0]]
        if others:
            shown = ", ".join(f"{found[i] or 'none'} on {names[i]}" for i in (0, *others[:7]))
            state = "failed" if package in _DECISIVE else "warning"
            checks.append(Check(f"{package} on the nodes", state, shown, "install one environment on all nodes"))
    return checks or [Check("versions on the nodes", "ok", "equal")]


def _storage_check(names: list[str], sees: list[bool]) -> Check:
    blind = [names[i] for i, is_seen in enumerate(sees) if not is_seen]
    if not blind:
        return Check("shared storage", "ok", "all nodes see the folder of the run")
    remedy = "fine while rank zero stays where it is; a restart may put it on another node: use shared storage"
    return Check("shared storage", "warning", f"not seen from {', '.join(blind[:8])} what node 0 wrote", remedy)


class _Token:
    """A file that node 0 writes and the others look for."""

    def __init__(self, meeting: Meeting, store: Any, folder: Path | None) -> None:
        self._meeting, self._store = meeting, store
        self._folder = None if folder is None else existing_part(folder)
        self._file: Any = None

    def __enter__(self) -> _Token:
        if self._meeting.node == 0:
            if self._folder is not None:
                with suppress(OSError):
                    self._file = NamedTemporaryFile(prefix=".rankfold-doctor-", dir=self._folder)
            _put(self._store, "token", Path(self._file.name).name if self._file else "")
        return self

    def __exit__(self, *_error: object) -> None:
        if self._file is not None:
            self._file.close()

    def is_seen(self) -> bool:
        name = _get(self._meeting, self._store, "token", 0)
        if self._folder is None or not name:
            return False
        ends = time.monotonic() + _SEEN_WITHIN_S
        # Listed, not stat'ed: a network file system may remember that a name was not there.
        while name not in {entry.name for entry in self._folder.iterdir()}:
            if time.monotonic() > ends:
                return False
            time.sleep(0.1)
        return True


def _ask(meeting: Meeting, store: Any) -> Callable[[], float]:
    number = 0

    def ask() -> float:
        nonlocal number
        number += 1
        _put(store, f"ping/{meeting.node}/{number}", True)
        return float(_get(meeting, store, f"pong/{meeting.node}/{number}", 0))

    _get(meeting, store, f"turn/{meeting.node}", 0)
    return ask


def _answer(meeting: Meeting, store: Any, clock: Callable[[], float]) -> None:
    """Answer the questions of every other node, one node after the other, so that no answer is slow."""
    for node in range(1, meeting.num_nodes):
        _put(store, f"turn/{node}", True)
        for number in range(1, NUM_PINGS + 1):
            _get(meeting, store, f"ping/{node}/{number}", node)
            _put(store, f"pong/{node}/{number}", clock())


def _leave(meeting: Meeting, store: Any, num_readers: int) -> None:
    """Keep the store, which lives in node 0, until everybody who is there has read."""
    store.add("read", 1)
    ends = time.monotonic() + meeting.timeout_s
    while meeting.node == 0 and store.add("read", 0) < num_readers and time.monotonic() < ends:
        time.sleep(_POLL_S)


def _put(store: Any, key: str, value: Any) -> None:
    store.set(key, json.dumps(value))


def _get(meeting: Meeting, store: Any, key: str, node: int) -> Any:
    try:
        return json.loads(store.get(key))
    except (dist.DistError, RuntimeError) as error:
        raise NodeAbsentError(f"node {node} did not answer within {meeting.timeout_s:g} s") from error
