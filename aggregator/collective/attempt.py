"""How the ranks of one attempt find each other in a store that may hold the keys of earlier attempts.

A launcher that restarts its workers may hand every attempt the same store, so no key with a fixed name can be
believed. And nothing may be asked of the training's process groups: the next collective of a rank that does not come
to ``watch`` would be taken for the answer. So rank zero draws a name and publishes it; every other rank leaves a token
under the name that it finds, and believes the name once rank zero has repeated that token. A name of a dead attempt is
never confirmed to a living rank, because its tokens are others.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from typing import Final, Protocol

from aggregator.collective.absence import attach_timeout

__all__ = ["Attempt", "KeyValueStore"]

_NAME_KEY: Final = "rankfold/attempt"
# Ranks whose tokens are confirmed together: a rank reads one small key however large the world is.
_CHUNK: Final = 64
_FIRST_POLL_S, _LAST_POLL_S = 0.005, 0.1


class KeyValueStore(Protocol):
    """What is asked of a store; ``torch.distributed.Store`` has it."""

    def set(self, key: str, value: str, /) -> None:
        """Write a key."""
        ...

    def get(self, key: str, /) -> bytes:
        """Read a key that is there."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Tell whether all keys are there."""
        ...

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter and return it."""
        ...


class Attempt:
    """One rank's part in the agreement on the attempt's name.

    Args:
        part: returns the part of the store under a prefix; "" is the whole.
        rank, world_size: of this process.
    """

    def __init__(self, part: Callable[[str], KeyValueStore], rank: int, world_size: int) -> None:
        self._part = part
        self._base = self._store = part("")
        self._rank = rank
        self._world_size = world_size
        self._token = secrets.token_hex(8)
        self._joined = ""

    @property
    def name(self) -> str:
        """Name of the attempt, once :meth:`agree` has returned."""
        return self._joined

    @property
    def prefix(self) -> str:
        """Prefix of the attempt's own keys, once :meth:`agree` has returned."""
        return f"rankfold/{self._joined}"

    def agree(self, deadline: float, waited_s: float) -> None:
        """Wait for all ranks; every rank calls this.

        Args:
            deadline: monotonic time to give up at.
            waited_s: what the caller waits altogether, for the message.

        Raises:
            AttachTimeoutError: names the ranks that did not come.
        """
        agreed = self._gather(deadline) if self._rank == 0 else self._join(deadline)
        if not agreed:
            raise attach_timeout(self._rank, self.missing(waited_s))

    def missing(self, waited_s: float) -> dict[int, str]:
        """Return the ranks that have not come, with how long they were waited for."""
        text = f"did not come to watch within {waited_s:g} s"
        if not self._joined:
            return {0: text}
        others = (rank for rank in range(1, self._world_size) if rank != self._rank)
        return {rank: text for rank in others if not self._store.check([_token_key(rank)])}

    def _gather(self, deadline: float) -> bool:
        self._enter(secrets.token_hex(16))
        self._base.set(_NAME_KEY, self._joined)
        if not _poll(lambda: int(self._store.add("count", 0)) >= self._world_size - 1, deadline):
            return False
        tokens = [self._store.get(_token_key(rank)).decode() for rank in range(1, self._world_size)]
        for start in range(0, len(tokens), _CHUNK):
            self._store.set(_confirmed_key(start + 1), json.dumps(tokens[start : start + _CHUNK]))
        return True

    def _join(self, deadline: float) -> bool:
        return _poll(self._is_confirmed, deadline)

    def _is_confirmed(self) -> bool:
        # First the name that this rank has joined: rank zero may by now have begun another attach of this process.
        key = _confirmed_key(self._rank)
        if self._joined and self._store.check([key]) and self._token in json.loads(self._store.get(key)):
            return True
        if self._base.check([_NAME_KEY]) and (name := self._base.get(_NAME_KEY).decode()) != self._joined:
            self._enter(name)
            self._store.set(_token_key(self._rank), self._token)
            self._store.add("count", 1)
        return False

    def _enter(self, name: str) -> None:
        self._joined = name
        self._store = self._part(self.prefix)


def _poll(is_done: Callable[[], bool], deadline: float) -> bool:
    pause_s = _FIRST_POLL_S
    while not is_done():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LAST_POLL_S)
    return True


def _token_key(rank: int) -> str:
    return f"token/{rank}"


def _confirmed_key(rank: int) -> str:
    return f"confirmed/{(rank - 1) // _CHUNK}"
