"""What is pending becomes durable when the process ends in order: at SIGTERM and at interpreter exit.

The handler of SIGTERM is set by the first step that waits for others, if that is on the main thread, and calls the one
that was there before. Where every step is committed by itself nothing is ever pending, and no handler is set: one in
Python keeps a signal from ending a process whose main thread hangs. A signal that arrives while this very thread is
inside of a writer is held until it is out.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Final, Protocol

__all__ = ["Settling", "settle_at_exit", "settle_at_sigterm"]

_SIGNAL_DEADLINE_S: Final = 10.0


class Settling(Protocol):
    """A writer, as far as the end of the process is concerned."""

    def settle(self, deadline_s: float) -> None:
        """Make durable what is pending and stop background work; gives up after ``deadline_s`` seconds."""
        ...

    def defer(self, action: Callable[[], None]) -> bool:
        """Do ``action`` when the calling thread has left the writer; False if it is not inside."""
        ...


_writers: weakref.WeakSet[Any] = weakref.WeakSet()
_pid = 0
_earlier: Any = None


def settle_at_exit(writer: Settling) -> None:
    """Settle ``writer`` when the interpreter exits, for as long as it is referenced."""
    global _pid
    if _pid != os.getpid():
        _writers.clear()  # A forked child must not end what its parent writes.
        _pid = os.getpid()
        atexit.register(_settle_all, _pid)
    _writers.add(writer)


def settle_at_sigterm() -> None:
    """Settle all writers at SIGTERM, too; does nothing on another thread than the main one."""
    global _earlier
    if threading.current_thread() is threading.main_thread():
        current = signal.getsignal(signal.SIGTERM)
        if current is not _on_sigterm and current is not None:
            _earlier = current
            signal.signal(signal.SIGTERM, _on_sigterm)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    if os.getpid() == _pid:
        if any(writer.defer(lambda: _on_sigterm(number, frame)) for writer in tuple(_writers)):
            return
        _settle_all(_pid)
    if callable(_earlier):
        _earlier(number, frame)
    elif _earlier is not signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _settle_all(pid: int) -> None:
    if os.getpid() == pid:
        for writer in tuple(_writers):
            with suppress(Exception):
                writer.settle(_SIGNAL_DEADLINE_S)
