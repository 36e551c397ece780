"""Who gets events: a callable, behind a guard, or a bounded queue that the user's loop empties."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from aggregator.events.event import Event, FindingEvent, HistogramEvent, ScalarEvent, UnavailableEvent
from telemetry.errors import ConfigurationError

__all__ = ["MAX_FAILURES", "QUEUE_EVENTS", "EventFilter", "EventQueue", "Subscription"]

QUEUE_EVENTS: Final = 4096
MAX_FAILURES: Final = 8

_TYPES: Final = frozenset(event.type for event in (ScalarEvent, HistogramEvent, FindingEvent, UnavailableEvent))


@dataclass(frozen=True)
class EventFilter:
    """Which events a receiver gets; what is empty restricts nothing.

    Attributes:
        types: of ``scalar``, ``histogram``, ``finding``, ``unavailable``.
        kinds: source kinds; an event without a kind passes only where this is empty.
        sites: globs of site names, likewise.
        fields: fields of scalars; other events pass.

    Raises:
        ConfigurationError: a type does not exist.
    """

    types: Iterable[str] = ()
    kinds: Iterable[str] = ()
    sites: Iterable[str] = ()
    fields: Iterable[str] = ()

    def __post_init__(self) -> None:
        for name in ("types", "kinds", "sites", "fields"):
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given))
        if unknown := [one for one in self.types if one not in _TYPES]:
            raise ConfigurationError(f"there are no events of type {unknown}", remedy=f"choose from {sorted(_TYPES)}")

    @property
    def wanted_types(self) -> frozenset[str]:
        """Types of which an event may pass."""
        return frozenset(self.types) or _TYPES

    def takes(self, event: Event) -> bool:
        """Tell whether the event passes."""
        return (
            (not self.types or event.type in self.types)
            and (not self.kinds or event.kind in self.kinds)
            and (not self.sites or any(fnmatchcase(event.site, glob) for glob in self.sites))
            and (not self.fields or not isinstance(event, ScalarEvent) or event.field in self.fields)
        )


class Subscription:
    """A callable of the user that gets each event, on the thread of the stream.

    One that raises is warned about once, through the logger ``rankfold.events``. After eight failures in a row it is
    disabled; the training, the record and the other subscribers never notice.

    Attributes:
        num_delivered: events that it took without raising.
        num_failures: events at which it raised.
        num_dropped: events that came after it was disabled.
        is_disabled: whether it was.
        only: which events it gets.
        last_failure: type and text of the last exception, "" if there was none.
    """

    def __init__(self, call: Callable[[Event], object], only: EventFilter) -> None:
        self.num_delivered = 0
        self.num_failures = 0
        self.num_dropped = 0
        self.is_disabled = False
        self.last_failure = ""
        self._call = call
        self.only = only
        self._num_in_a_row = 0

    def receive(self, event: Event) -> None:
        """Hand over one event. Called by the stream; never raises an ``Exception``."""
        if not self.only.takes(event):
            return
        if self.is_disabled:
            self.num_dropped += 1
            return
        try:
            self._call(event)
        except Exception as error:
            self._failed(error)
        else:
            self.num_delivered += 1
            self._num_in_a_row = 0

    def end(self) -> None:
        """Nothing is held back."""

    def _failed(self, error: Exception) -> None:
        self.num_failures += 1
        self._num_in_a_row += 1
        self.last_failure = f"{type(error).__name__}: {error}"
        self.is_disabled = self._num_in_a_row >= MAX_FAILURES
        if self.num_failures == 1:
            name = getattr(self._call, "__qualname__", repr(self._call))
            logging.getLogger("rankfold.events").warning(
                "subscriber %s raised; after %d failures in a row it is disabled", name, MAX_FAILURES, exc_info=error
            )


class EventQueue:
    """The newest events, at most ``capacity`` of them, for a loop that asks when it has time.

    Attributes:
        capacity: when it is full, the oldest event makes room and is counted.
        only: which events it keeps.
        num_dropped: events that were lost so.
        is_ended: whether the run is over; what is in the queue can still be taken.
    """

    def __init__(self, capacity: int, only: EventFilter) -> None:
        self.capacity = capacity
        self.num_dropped = 0
        self.is_ended = False
        self.only = only
        self._events: deque[Event] = deque()
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._events)

    def take(self, timeout_s: float = 0.0) -> list[Event]:
        """Return all events that are there, oldest first, and forget them.

        Args:
            timeout_s: how long to wait for the first one, seconds; the end of the run ends the wait.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._events or self.is_ended, timeout_s)
            taken = list(self._events)
            self._events.clear()
        return taken

    def receive(self, event: Event) -> None:
        """Keep one event. Called by the stream."""
        if not self.only.takes(event):
            return
        with self._changed:
            if len(self._events) == self.capacity:
                self._events.popleft()
                self.num_dropped += 1
            self._events.append(event)
            self._changed.notify_all()

    def end(self) -> None:
        """Wake whoever waits. Called by the stream at its close."""
        with self._changed:
            self.is_ended = True
            self._changed.notify_all()

    def __getstate__(self) -> dict[str, Any]:
        # A sink pickles until it is opened, and a lock does not.
        return {name: value for name, value in vars(self).items() if name != "_changed"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._changed = threading.Condition()
