"""Calls that may hang, made on a thread of their own, so that the caller can give up on them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["Background"]

_T = TypeVar("_T")


class Background:
    """One thread that makes one call after the other. Being a daemon, it never keeps the process from ending."""

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, call: Callable[[], _T]) -> Future[_T]:
        """Queue a call; the future gets its result or what it raised."""
        future: Future[_T] = Future()

        def carry_out() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(carry_out)
        return future

    def _run(self) -> None:
        while True:
            self._calls.get()()
