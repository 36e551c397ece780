"""A signal ends a run of gates as an exception, whatever is waited for when it comes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from launch.process import handled_signals

__all__ = ["Stopped", "stop_on_signals"]


class Stopped(KeyboardInterrupt):
    """The run was stopped by a signal. No ``Exception``: what is stopped has not failed, and has no verdict."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Raise :class:`Stopped` where the process is when a signal comes; call from the main thread."""
    with handled_signals(_raise):
        yield


def _raise(number: int, _frame: FrameType | None) -> None:
    raise Stopped(number)
