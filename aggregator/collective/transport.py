"""The links to the parent and the children: the only module that communicates through ``torch.distributed``.

Each link of the tree is a gloo group of two ranks in host memory. It is built directly, not through ``new_group``, so
the groups of the training are never touched, no other rank has to take part, and a link that fails poisons no other.

Gloo facts this relies on, all covered by tests: a small send completes as soon as the peer has posted its receive,
whatever its Python threads do; a receive that completed before the peer went away still returns its data; the death
of the peer wakes a waiting receive at once; a receive that times out closes the sockets of its group.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, _get_default_store

from aggregator.collective.attempt import Attempt
from aggregator.collective.frames import HEADER_BYTES, Frame, FrameKind, parse_header
from aggregator.collective.tree import TreePosition
from telemetry.errors import PeerLostError, ProcessGroupMissingError, RankfoldError

__all__ = ["Link", "Rendezvous"]

_HEADER_TAG, _PAYLOAD_TAG, _POISON_TAG = 0, 1, 2
# A reader waits as long as its link lives; Link.close ends it by closing the sockets.
_LIFETIME: Final = timedelta(days=365)
_BREAK_WAIT_S: Final = 1.0
# Sends are not waited for, so their buffers are kept until they must have left: neighbours answer every frame but the
# last few, so more parts than these are never under way.
_KEPT_PARTS: Final = 32
_POLL_S: Final = 0.02

OnFrame = Callable[[int, Frame], None]
OnBroken = Callable[[int, str], None]


class Link:
    """One connection to one rank, with a thread that reads it.

    Frames arrive through ``on_frame(peer, frame)``, the end of the connection through ``on_broken(peer, reason)``;
    both are called on the reading thread.
    """

    def __init__(self, group: Any, peer: int, peer_slot: int, on_frame: OnFrame, on_broken: OnBroken) -> None:
        """Take over a group of two, in which the peer has rank ``peer_slot``."""
        self.peer = peer
        self._group = group
        self._slot = peer_slot
        self._on_frame, self._on_broken = on_frame, on_broken
        self._sending = threading.Lock()
        self._posted: deque[tuple[Any, Tensor]] = deque(maxlen=_KEPT_PARTS)
        self._end_sent = False
        self._reader = threading.Thread(target=self._read, name=f"rankfold-link-{peer}", daemon=True)
        self._reader.start()

    def post(self, frame: Frame) -> None:
        """Begin to send a frame and return; what is posted first arrives first.

        Raises:
            PeerLostError: the connection is broken.
        """
        header, payload = frame.encode()
        parts = [(bytearray(header), _HEADER_TAG)] + ([(payload, _PAYLOAD_TAG)] if payload else [])
        with self._sending:
            try:
                for data, tag in parts:
                    tensor = torch.frombuffer(data, dtype=torch.uint8)
                    self._posted.append((self._group.send([tensor], self._slot, tag), tensor))
            except RuntimeError as error:
                raise PeerLostError(f"cannot send to rank {self.peer}: {_short(error)}", rank=self.peer) from error

    def end(self) -> None:
        """Say that nothing more comes; the peer's reader answers alike. Called from any thread, acts once."""
        with self._sending:
            first, self._end_sent = not self._end_sent, True
        if first:
            with suppress(RankfoldError):
                self.post(Frame(FrameKind.END, {}))

    def release(self, deadline: float) -> None:
        """Wait until ``deadline`` (monotonic) for the answer to :meth:`end`, then drop the connection."""
        self._reader.join(max(0.0, deadline - time.monotonic()))
        if self._reader.is_alive():
            self._break()
            self._reader.join(_BREAK_WAIT_S)
        self._posted.clear()
        self._group = None

    def _break(self) -> None:
        """Close the sockets: a pending receive cannot be cancelled from Python, but one that times out does this."""
        with suppress(RuntimeError):
            scratch = torch.empty(1, dtype=torch.uint8)
            self._group.recv([scratch], self._slot, _POISON_TAG).wait(timedelta(milliseconds=1))

    def _read(self) -> None:
        group = self._group
        try:
            while (frame := self._read_frame(group)).kind is not FrameKind.END:
                self._on_frame(self.peer, frame)
        except (RuntimeError, RankfoldError) as error:
            self._on_broken(self.peer, _short(error))
            return
        self.end()
        self._on_broken(self.peer, "it ended the connection")

    def _read_frame(self, group: Any) -> Frame:
        kind, length = parse_header(self._receive(group, HEADER_BYTES, _HEADER_TAG).tobytes())
        payload = memoryview(self._receive(group, length, _PAYLOAD_TAG)) if length else b""
        return Frame.decode(kind, payload)

    def _receive(self, group: Any, num_bytes: int, tag: int) -> Any:
        tensor = torch.empty(num_bytes, dtype=torch.uint8)
        group.recv([tensor], self._slot, tag).wait(_LIFETIME)
        return tensor.numpy()


class Rendezvous:
    """Finds the neighbours of one rank and connects to them, within one deadline."""

    def __init__(self, position: TreePosition, timeout_s: float) -> None:
        """Agree with all ranks on the name of this attempt. Called on the training thread of every rank.

        Args:
            position: this rank.
            timeout_s: for this and for :meth:`connect` together.

        Raises:
            ProcessGroupMissingError: the world has several ranks but ``torch.distributed`` is not initialised.
            AttachTimeoutError: some rank did not come.
        """
        self._position = position
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        if position.world_size == 1:
            return
        if not dist.is_initialized():
            raise ProcessGroupMissingError(
                f"the job has {position.world_size} ranks, but torch.distributed is not initialised",
                rank=position.rank,
                remedy="call torch.distributed.init_process_group before telemetry.watch",
            )
        self._attempt = Attempt(_part_of_store, position.rank, position.world_size)
        self._attempt.agree(self._deadline, timeout_s)
        self._store = _part_of_store(self._attempt.prefix)
        self._store.set(str(position.rank), "here")
        self._device = _host_device()

    def connect(
        self, peers: Iterable[int], on_frame: OnFrame, on_broken: OnBroken, grace_s: float = 0.0
    ) -> dict[int, Link]:
        """Connect to neighbours, each as soon as it is there; both sides of a link call this.

        Args:
            peers: parent or children; those that do not come in time are left out of the result.
            on_frame, on_broken: see :class:`Link`.
            grace_s: how much longer than the deadline a peer may be busy with other neighbours.
        """
        waiting, links = list(peers), {}
        while waiting:
            for peer in [peer for peer in waiting if self._store.check([str(peer)])]:
                waiting.remove(peer)
                if (link := self._connect(peer, on_frame, on_broken, grace_s)) is not None:
                    links[peer] = link
            if time.monotonic() > self._deadline:
                break
            if waiting:
                time.sleep(_POLL_S)
        return links

    def _connect(self, peer: int, on_frame: OnFrame, on_broken: OnBroken, grace_s: float) -> Link | None:
        parent, child = sorted((self._position.rank, peer))
        slot = int(self._position.rank == child)
        store = PrefixStore(f"{parent}-{child}", self._store)
        try:
            group = ProcessGroupGloo(store, slot, 2, _options(self._device, self._remaining_s() + grace_s))
        except RuntimeError:
            return None
        return Link(group, peer, 1 - slot, on_frame, on_broken)

    def missing(self) -> dict[int, str]:
        """Return the ranks that have not come, with how long they were waited for."""
        return self._attempt.missing(self._timeout_s) if self._position.world_size > 1 else {}

    def _remaining_s(self) -> float:
        return max(0.05, self._deadline - time.monotonic())


def _part_of_store(prefix: str) -> Any:
    """Return the keys of the default group's store that begin with ``prefix``."""
    store = _get_default_store()
    return PrefixStore(prefix, store) if prefix else store


def _options(device: Any, timeout_s: float) -> Any:
    options = cast(Any, ProcessGroupGloo)._Options()
    options._devices = [device]
    options._threads = 1
    options._timeout = timedelta(seconds=timeout_s)
    return options


def _host_device() -> Any:
    """Return one gloo device for all links, on the interface that the training's own gloo groups would use."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return ProcessGroupGloo.create_device(interface=interface)
    return ProcessGroupGloo.create_default_device()


def _short(error: BaseException) -> str:
    """Return the sentence of a gloo error without its source path."""
    return str(error).rpartition("] ")[2].split(". This is")[0][:200] or type(error).__name__
