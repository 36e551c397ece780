"""A signal ends a run of gates as an exception, whatever is waited for when it comes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

__all__ = ["STOPPING", "Stopped", "stop_on_signals"]

STOPPING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """The run was stopped by a signal. No ``Exception``: what is stopped has not failed, and has no verdict."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Raise :class:`Stopped` where the process is when a signal comes; call from the main thread."""
    earlier = {number: signal.signal(number, _raise) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _raise(number: int, _frame: FrameType | None) -> None:
    raise Stopped(number)
