"""Processes that a gate starts, listens to and kills: each runs a function and sends what it has to tell."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

from telemetry.errors import RankfoldError

__all__ = ["Child", "Tell", "load_once"]

# Forked from a server that has loaded modules: a child costs milliseconds, and is free of our threads.
_CONTEXT: Final = multiprocessing.get_context("forkserver")
_END_S: Final = 30.0

Tell = Callable[[Any], None]


def load_once(*modules: str) -> None:
    """Say what children need, to be loaded once for all of them; call before the first starts."""
    _CONTEXT.set_forkserver_preload([__name__, *modules])


class Child:
    """One process, from its start on; it dies with this one.

    Attributes:
        process: to be killed and waited for.
    """

    def __init__(self, body: Callable[..., None], *arguments: Any) -> None:
        """Start ``body(*arguments, tell)``, a function at module level; an error of ours is told by its code."""
        self._pipe, theirs = _CONTEXT.Pipe(duplex=False)
        self.process = _CONTEXT.Process(target=_run, args=(body, arguments, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self, within_s: float = 60.0) -> Any:
        """Return the next thing it tells, None once it has ended.

        Raises:
            TimeoutError: it told nothing.
            RuntimeError: it raised an error that is not ours.
        """
        if not self._pipe.poll(within_s):
            raise TimeoutError(f"a child of the gate told nothing for {within_s:g} s")
        try:
            told = self._pipe.recv()
        except EOFError:
            return None
        if isinstance(told, _Raised):
            raise RuntimeError(f"a child of the gate raised {told.text}")
        return told

    def hear_all(self, within_s: float = 60.0) -> list[Any]:
        """Return everything that it still has to tell; it is killed if it has not ended by then."""
        ends_at = time.monotonic() + within_s
        told: list[Any] = []
        while (left_s := ends_at - time.monotonic()) > 0 and self._pipe.poll(left_s):
            if (what := self.hear(0.0)) is None:
                self.process.join(_END_S)
                return told
            told.append(what)
        return [*told, *self.kill()]

    def kill(self) -> list[Any]:
        """Kill it with SIGKILL and return what it had told before."""
        self.process.kill()
        self.process.join(_END_S)
        told: list[Any] = []
        while (what := self.hear(0.0)) is not None:
            told.append(what)
        return told


@dataclass(frozen=True)
class _Raised:
    text: str


def _run(body: Callable[..., None], arguments: tuple[Any, ...], pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        body(*arguments, pipe.send)
    except RankfoldError as error:
        pipe.send(error.code)
    except Exception:
        pipe.send(_Raised(traceback.format_exc()))
