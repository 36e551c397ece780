"""The stream: a sink that turns committed steps into events, off the way of training and of commits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from aggregator.catalogue import MergedStep
from aggregator.events.event import Event
from aggregator.events.receivers import QUEUE_EVENTS, EventFilter, EventQueue, Subscription
from aggregator.events.translate import events_of
from aggregator.health.update_ratio import UPDATE_TO_WEIGHT
from aggregator.sinks.protocol import RunInfo
from aggregator.sinks.values import NONFINITE
from telemetry.errors import ConfigurationError, FieldUnknownError
from telemetry.summary import SUMMARY_FIELDS

__all__ = ["DEFAULT_FIELDS", "EventStream"]

DEFAULT_FIELDS: Final = ("mean", "std", "rms", "absmax", "zero_fraction", NONFINITE, UPDATE_TO_WEIGHT)
_FIELDS: Final = (*SUMMARY_FIELDS, NONFINITE, UPDATE_TO_WEIGHT)


class EventStream:
    """Give it to ``watch`` as a sink, on every rank; it comes to life on the rank that writes the record.

    A receiver gets the events of a step after the step is committed. All receivers share the thread of the stream: one
    that is slow delays the others, and if it falls 64 steps behind, steps are dropped and counted in the report of the
    sink.

    Example:
        >>> events = EventStream()
        >>> alarms = events.subscribe(print, types="finding")
        >>> losses_of_sight = events.queue(types="unavailable")
    """

    name = "events"
    capabilities = frozenset({"scalar", "raw_histogram", "structured_event"})

    def __init__(self, fields: Sequence[str] = DEFAULT_FIELDS) -> None:
        """Make a stream without receivers.

        Args:
            fields: which numbers become scalar events, of ``telemetry.summary.SUMMARY_FIELDS``, ``nonfinite`` and
                ``update_to_weight``.

        Raises:
            FieldUnknownError: a field does not exist.
        """
        if unknown := [field for field in fields if field not in _FIELDS]:
            raise FieldUnknownError(f"EventStream got fields {unknown}", remedy=f"use {', '.join(_FIELDS)}")
        self.fields = tuple(fields)
        self._receivers: tuple[Subscription | EventQueue, ...] = ()

    @property
    def num_dropped(self) -> int:
        """Number of events that full queues and disabled subscribers have missed, over all receivers."""
        return sum(receiver.num_dropped for receiver in self._receivers)

    def subscribe(
        self,
        call: Callable[[Event], object],
        *,
        types: Iterable[str] = (),
        kinds: Iterable[str] = (),
        sites: Iterable[str] = (),
        fields: Iterable[str] = (),
    ) -> Subscription:
        """Call ``call`` with each event that passes, see :class:`EventFilter`, on the rank that writes the record.

        Raises:
            ConfigurationError: ``call`` cannot be called, or a type does not exist.
        """
        if not callable(call):
            raise ConfigurationError(f"{call!r} cannot be called", remedy="give a function of one event")
        subscription = Subscription(call, EventFilter(types, kinds, sites, fields))
        self._receivers = (*self._receivers, subscription)
        return subscription

    def queue(
        self,
        capacity: int = QUEUE_EVENTS,
        *,
        types: Iterable[str] = (),
        kinds: Iterable[str] = (),
        sites: Iterable[str] = (),
        fields: Iterable[str] = (),
    ) -> EventQueue:
        """Return a queue of the events that pass, for a loop in the process that writes the record.

        Raises:
            ConfigurationError: the capacity is not between 1 and 4096, or a type does not exist.
        """
        if isinstance(capacity, bool) or not isinstance(capacity, int) or not 1 <= capacity <= QUEUE_EVENTS:
            raise ConfigurationError(
                f"capacity is {capacity!r}", remedy=f"give a whole number from 1 to {QUEUE_EVENTS}"
            )
        queue = EventQueue(capacity, EventFilter(types, kinds, sites, fields))
        self._receivers = (*self._receivers, queue)
        return queue

    def open(self, run: RunInfo) -> None:
        """Nothing has to be acquired."""

    def emit(self, step: MergedStep) -> None:
        """Hand the events of a step to every receiver."""
        receivers = self._receivers
        types = frozenset[str]().union(*(receiver.only.wanted_types for receiver in receivers))
        for event in events_of(step, self.fields, types):
            for receiver in receivers:
                receiver.receive(event)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Tell the queues that no more will come."""
        for receiver in self._receivers:
            receiver.end()
