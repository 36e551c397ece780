"""The links to the parent and the children: the only module that communicates through ``torch.distributed``.

Each link of the tree is a gloo group of two ranks in host memory. It is built directly, not through ``new_group``, so
the groups of the training are never touched, no other rank has to take part, and a link that fails poisons no other.

Gloo facts this relies on, all covered by tests: a small send completes as soon as the peer has posted its receive,
whatever its Python threads do; a receive that completed before the peer went away still returns its data; the death
of the peer wakes a waiting receive at once; a receive that times out closes the sockets of its group.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, _get_default_store

from aggregator.collective.absence import attach_timeout
from aggregator.collective.attempt import Attempt
from aggregator.collective.frames import HEADER_BYTES, Frame, FrameKind, parse_header
from aggregator.collective.places import find_place, forget_place
from aggregator.collective.tree import TreePosition, plan_tree
from aggregator.collective.waits import Waits
from telemetry.errors import PeerLostError, ProcessGroupMissingError, RankfoldError

__all__ = ["Link", "Rendezvous", "agree_on_attempt"]

_HEADER_TAG, _PAYLOAD_TAG, _POISON_TAG = 0, 1, 2
# A reader waits as long as its link lives; Link.close ends it by closing the sockets.
_LIFETIME: Final = timedelta(days=365)
_BREAK_WAIT_S: Final = 1.0
# Sends are not waited for, so their buffers are kept until they must have left: neighbours answer every frame but the
# last few, so more parts than these are never under way.
_KEPT_PARTS: Final = 32

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
        kind, number, length = parse_header(self._receive(group, HEADER_BYTES, _HEADER_TAG).tobytes())
        payload = memoryview(self._receive(group, length, _PAYLOAD_TAG)) if length else b""
        return Frame.decode(kind, number, payload)

    def _receive(self, group: Any, num_bytes: int, tag: int) -> Any:
        tensor = torch.empty(num_bytes, dtype=torch.uint8)
        group.recv([tensor], self._slot, tag).wait(_LIFETIME)
        return tensor.numpy()


class Rendezvous:
    """Finds the place of one rank in the tree and connects it to its neighbours, within one deadline."""

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        """Agree with all ranks on the name of this attempt. Called on the training thread of every rank.

        Args:
            rank, world_size: of this process.
            timeout_s: for this, :meth:`find_place` and :meth:`connect` together.

        Raises:
            ProcessGroupMissingError: the world has several ranks but ``torch.distributed`` is not initialised.
            AttachTimeoutError: some rank did not come.
        """
        self._rank, self._world_size = rank, world_size
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        if world_size == 1:
            return
        self._attempt = _agreed_attempt(rank, world_size, timeout_s)
        self._store = _part_of_store(self._attempt.prefix)
        self._device = _host_device()

    def find_place(self, fan_in: int, host: str | None) -> TreePosition:
        """Return where this rank stands in the tree; see :func:`aggregator.collective.places.find_place`.

        Raises:
            AttachTimeoutError: some rank did not come.
        """
        if self._world_size == 1:
            return plan_tree([""], fan_in)[0]
        try:
            self._position = find_place(
                self._store,
                self._rank,
                self._world_size,
                host=host,
                fan_in=fan_in,
                timeout_s=self._remaining_s(),
            )
        except RuntimeError as error:
            raise attach_timeout(self._rank, self.missing() or {0: "gave no place in the tree"}) from error
        return self._position

    def connect(self, on_frame: OnFrame, on_broken: OnBroken, waits: Waits) -> dict[int, Link]:
        """Connect to the parent, then to the children, in rank order; both sides of a link call this.

        A child waits for its parent, so rank zero begins. Every rank has come by now: the wait is for neighbours that
        are busy with others.

        Args:
            on_frame, on_broken: see :class:`Link`.
            waits: of this rank, for how much longer than the deadline a neighbour may be busy.

        Returns:
            Peer → link; those that could not be connected in time are left out.
        """
        links: dict[int, Link] = {}
        if self._world_size == 1:
            return links
        for peer in self._position.neighbours:
            grace_s = waits.verdict_s if peer == self._position.parent else waits.offers_s
            if (group := self._connect(peer, self._remaining_s(grace_s))) is not None:
                links[peer] = Link(group, peer, int(peer != self._position.parent), on_frame, on_broken)
        return links

    def _connect(self, peer: int, timeout_s: float) -> Any:
        is_child = peer == self._position.parent
        parent, child = (peer, self._rank) if is_child else (self._rank, peer)
        store = PrefixStore(f"{parent}-{child}", self._store)
        try:
            return ProcessGroupGloo(store, int(is_child), 2, _options(self._device, timeout_s))
        except RuntimeError:
            return None

    def missing(self) -> dict[int, str]:
        """Return the ranks that have not come, with how long they were waited for."""
        return self._attempt.missing(self._timeout_s) if self._world_size > 1 else {}

    def finish(self) -> None:
        """Remove what this rank left in the store, which later attempts may share."""
        if self._world_size > 1:
            forget_place(self._store, self._rank)

    def _remaining_s(self, grace_s: float = 0.0) -> float:
        return max(0.05, self._deadline + grace_s - time.monotonic())


def agree_on_attempt(rank: int, world_size: int, timeout_s: float) -> str:
    """Return a name that the ranks of this attempt share and no other attempt has. Called on every rank.

    Raises:
        ProcessGroupMissingError, AttachTimeoutError: as :class:`Rendezvous`.
    """
    if world_size == 1:
        return secrets.token_hex(16)
    return _agreed_attempt(rank, world_size, timeout_s).name


def _agreed_attempt(rank: int, world_size: int, timeout_s: float) -> Attempt:
    if not dist.is_initialized():
        raise ProcessGroupMissingError(
            f"the job has {world_size} ranks, but torch.distributed is not initialised",
            rank=rank,
            remedy="call torch.distributed.init_process_group before telemetry.watch",
        )
    attempt = Attempt(_part_of_store, rank, world_size)
    attempt.agree(time.monotonic() + timeout_s, timeout_s)
    return attempt


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
