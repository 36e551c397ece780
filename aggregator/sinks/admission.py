"""What is refused of sinks at attach: by name, on all ranks, and before the run exists."""

from __future__ import annotations

from collections.abc import Sequence

from aggregator.sinks.protocol import CAPABILITIES, ExactingSink, RunPlan, Sink
from telemetry.errors import ConfigurationError, SinkCapabilityError, SinkDuplicateError

__all__ = ["admit_sinks", "require_valid_sinks"]


def admit_sinks(sinks: Sequence[object], plan: RunPlan) -> None:
    """Let every sink judge the run that is about to begin. Called where the record is written, before it is claimed.

    Raises:
        ConfigurationError: a subclass; see :func:`require_valid_sinks`, or what a sink refuses.
    """
    for sink in require_valid_sinks(sinks):
        if isinstance(sink, ExactingSink):
            sink.admit(plan)


def require_valid_sinks(sinks: Sequence[object]) -> tuple[Sink, ...]:
    """Return the sinks, typed.

    Raises:
        SinkDuplicateError: one object was given twice. Two objects of one class are two sinks.
        SinkCapabilityError: a sink was asked for what it does not carry.
        ConfigurationError: an object is no sink, or uses a word that is no capability.
    """
    valid = []
    for i, sink in enumerate(sinks):
        if any(sink is earlier for earlier in sinks[:i]):
            raise SinkDuplicateError(
                f"sink {getattr(sink, 'name', sink)!r} was given twice", remedy="give each sink once"
            )
        if isinstance(sink, type) or not isinstance(sink, Sink):
            raise ConfigurationError(
                f"{sink!r} is no sink", remedy="give objects with the methods of aggregator.sinks.Sink"
            )
        _require_capable(sink)
        valid.append(sink)
    return tuple(valid)


def _require_capable(sink: Sink) -> None:
    wanted = sink.wanted if isinstance(sink, ExactingSink) else frozenset[str]()
    capabilities = sink.capabilities
    if unknown := sorted((capabilities | wanted) - CAPABILITIES):
        raise ConfigurationError(
            f"sink {sink.name!r} speaks of capabilities {unknown}", remedy=f"use words of {sorted(CAPABILITIES)}"
        )
    if missing := sorted(wanted - capabilities):
        raise SinkCapabilityError(
            f"sink {sink.name!r} was asked for {', '.join(missing)}, and carries {', '.join(sorted(capabilities))}",
            remedy="do not ask this sink for it; the history has all of it, and other sinks may carry it",
        )
