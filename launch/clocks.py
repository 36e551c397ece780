"""How far the clock of this machine can be trusted, by itself and against that of another node."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

__all__ = ["NUM_PINGS", "Offset", "kernel_clock_error_s", "offset_to"]

NUM_PINGS: Final = 16
_UNSYNCHRONISED: Final = 5  # TIME_ERROR of adjtimex(2)


@dataclass(frozen=True)
class Offset:
    """Of another clock against ours.

    Attributes:
        offset_s: seconds that the other one is ahead; uncertainty_s: how far off that may be either way.
    """

    offset_s: float
    uncertainty_s: float


def offset_to(ask: Callable[[], float], clock: Callable[[], float] = time.time) -> Offset:
    """Measure how far another clock is ahead of ours.

    Of several questions the one with the quickest answer counts: the other clock was read somewhere between its two
    ends, so their middle is at most half of that time wrong (Cristian, "Probabilistic clock synchronization", 1989).

    Args:
        ask: returns the time of the other clock, now, in seconds of the epoch.
        clock: ours.
    """
    best = Offset(0.0, float("inf"))
    for _ in range(NUM_PINGS):
        sent, took = clock(), time.perf_counter()
        theirs = ask()
        half = (time.perf_counter() - took) / 2
        if half < best.uncertainty_s:
            best = Offset(theirs - (sent + half), half)
    return best


class _Timex(ctypes.Structure):
    # The head of struct timex of Linux; what follows is never read, but must be there to be written.
    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 64),
    )


def kernel_clock_error_s() -> float | None:
    """Return the kernel's bound on the error of its clock in seconds, infinity if nothing keeps it in time.

    Read from adjtimex(2), which changes nothing here; None where there is none.
    """
    if not sys.platform.startswith("linux"):
        return None
    state = _Timex()
    code = ctypes.CDLL(None).adjtimex(ctypes.byref(state))
    if code < 0:
        return None
    return float("inf") if code == _UNSYNCHRONISED else state.maxerror * 1e-6
