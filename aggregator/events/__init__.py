"""The merged record as a bounded stream of small typed events, for one's own checks."""

from aggregator.events.event import Event, FindingEvent, HistogramEvent, ScalarEvent, UnavailableEvent
from aggregator.events.receivers import EventFilter, EventQueue, Subscription
from aggregator.events.stream import EventStream

__all__ = [
    "Event",
    "EventFilter",
    "EventQueue",
    "EventStream",
    "FindingEvent",
    "HistogramEvent",
    "ScalarEvent",
    "Subscription",
    "UnavailableEvent",
]
