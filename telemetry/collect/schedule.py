"""When a signal is due: a function of the global step alone, so that every rank and every restart agrees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from telemetry.errors import ConfigurationError, SignalUnknownError
from telemetry.sites import KIND_OF_SIGNAL, SIGNALS

__all__ = ["ANY_KIND", "DEFAULT_EVERY", "DEFAULT_HIST_EVERY", "Schedule"]

ANY_KIND = "call_sites"
"""Name in a schedule of call sites of whatever kind, where the session names none."""

DEFAULT_EVERY = 50
DEFAULT_HIST_EVERY = 200


@dataclass(frozen=True)
class Schedule:
    """The cadence of each requested signal.

    Attributes:
        every: signal, or source kind of call sites → interval in steps; it is due at multiples of that.
        hist_every: interval of histograms, None for none; they come on steps on which the signal is due as well.
        last_step: the run's last step where it is known; it is always due.
        first_step: whether the first step that the session sees is always due as well.
        offset: added to a step before it is compared with an interval.
    """

    every: Mapping[str, int]
    hist_every: int | None
    last_step: int | None = None
    first_step: bool = True
    offset: int = 0

    @staticmethod
    def build(
        signals: Sequence[str],
        every: int | Mapping[str, int],
        hist_every: int | None,
        last_step: int | None,
        *,
        call_sites: Sequence[str] = (),
        first_step: bool = True,
        offset: int = 0,
    ) -> Schedule:
        """Check the user's arguments and make the schedule.

        A session of neither signals nor kinds has the cadence of :data:`ANY_KIND`, for scopes that others open.

        Raises:
            SignalUnknownError: a name is no signal.
            ConfigurationError: an interval is not a positive integer.
        """
        _require_known("signals", (signals,) if isinstance(signals, str) else signals, SIGNALS)
        kinds = _checked_kinds(call_sites)
        given = ((signals,) if isinstance(signals, str) else tuple(signals)) + kinds
        chosen = tuple(dict.fromkeys(given)) or (ANY_KIND,)
        if isinstance(every, Mapping):
            _require_known("every", tuple(every), (*SIGNALS, *kinds, ANY_KIND))
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
        if not isinstance(offset, int) or isinstance(offset, bool):
            raise ConfigurationError(f"due_offset is {offset!r}", remedy="give a whole number of steps")
        return Schedule(intervals, hist_every, last_step, first_step, offset)

    def due(self, step: int, *, is_first: bool) -> frozenset[str]:
        """Return what is due at ``step``; everything at the first and the last step."""
        if (is_first and self.first_step) or step == self.last_step:
            return frozenset(self.every)
        return frozenset(signal for signal, interval in self.every.items() if (step + self.offset) % interval == 0)

    def histogram_due(self, step: int, *, is_first: bool) -> bool:
        """Tell whether what is observed at ``step`` also gets a histogram."""
        if self.hist_every is None:
            return False
        is_edge = (is_first and self.first_step) or step == self.last_step
        return is_edge or (step + self.offset) % self.hist_every == 0


def _require_known(argument: str, names: Sequence[str], known: Sequence[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SignalUnknownError(
            f"{argument} names {', '.join(map(repr, unknown))}; it may name {', '.join(known)}",
            remedy="choose from these names",
        )


def _checked_kinds(call_sites: Sequence[str]) -> tuple[str, ...]:
    kinds = (call_sites,) if isinstance(call_sites, str) else tuple(dict.fromkeys(call_sites))
    reserved = {*SIGNALS, *KIND_OF_SIGNAL.values(), ANY_KIND}
    for kind in kinds:
        if not isinstance(kind, str) or not kind or kind in reserved:
            raise ConfigurationError(
                f"call_sites names {kind!r}, which is no source kind of a call site",
                remedy="give the kinds that the model's observe_tensor calls use; the signals have kinds of their own",
            )
    return kinds
