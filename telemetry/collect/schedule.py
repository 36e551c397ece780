"""When a signal is due: a function of the global step alone, so that every rank and every restart agrees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from telemetry.errors import ConfigurationError, SignalUnknownError
from telemetry.sites import SIGNALS

__all__ = ["DEFAULT_EVERY", "DEFAULT_HIST_EVERY", "Schedule"]

DEFAULT_EVERY = 50
DEFAULT_HIST_EVERY = 200


@dataclass(frozen=True)
class Schedule:
    """The cadence of each requested signal.

    Attributes:
        every: signal → interval in steps; a signal is due at multiples of it.
        hist_every: interval of histograms, None for none; they come on steps on which the signal is due as well.
        last_step: the run's last step where it is known; it is always due.
    """

    every: Mapping[str, int]
    hist_every: int | None
    last_step: int | None = None

    @staticmethod
    def build(
        signals: Sequence[str], every: int | Mapping[str, int], hist_every: int | None, last_step: int | None
    ) -> Schedule:
        """Check the user's arguments and make the schedule.

        Raises:
            SignalUnknownError: a name is no signal.
            ConfigurationError: an interval is not a positive integer.
        """
        _require_known("signals", (signals,) if isinstance(signals, str) else signals)
        chosen = (signals,) if isinstance(signals, str) else tuple(dict.fromkeys(signals))
        if isinstance(every, Mapping):
            _require_known("every", tuple(every))
            intervals = {signal: every.get(signal, DEFAULT_EVERY) for signal in chosen}
        else:
            intervals = dict.fromkeys(chosen, every)
        for name, interval in (*intervals.items(), ("hist_every", hist_every)):
            if name == "hist_every" and interval is None:
                continue
            if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
                raise ConfigurationError(
                    f"the interval of {name} is {interval!r}", remedy="give a whole number of steps, 1 or more"
                )
        return Schedule(intervals, hist_every, last_step)

    def due(self, step: int, *, is_first: bool) -> frozenset[str]:
        """Return the signals that are due at ``step``; all of them at the first and the last step."""
        if is_first or step == self.last_step:
            return frozenset(self.every)
        return frozenset(signal for signal, interval in self.every.items() if step % interval == 0)

    def histogram_due(self, step: int, *, is_first: bool) -> bool:
        """Tell whether what is observed at ``step`` also gets a histogram."""
        if self.hist_every is None:
            return False
        return is_first or step == self.last_step or step % self.hist_every == 0


def _require_known(argument: str, names: Sequence[str]) -> None:
    unknown = [name for name in names if name not in SIGNALS]
    if unknown:
        raise SignalUnknownError(
            f"{argument} names {', '.join(map(repr, unknown))}; the signals are {', '.join(SIGNALS)}",
            remedy="choose from these names",
        )
