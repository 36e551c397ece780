"""Megatron's training loop drives a session by the two calls it makes for its own tensor metrics.

In each iteration the loop enters ``observe_forward_backward`` around its forward-backward function, and calls the
observer before the optimizer steps, when gradients are final. It takes anything with these two in the place of its own:

    observer = telemetry.integrations.megatron.build(args.tensor_metrics, to="runs/exp1")
    ...
    with observer.observe_forward_backward(model=model, iteration=iteration, pg_collection=pg_collection):
        losses = forward_backward_func(...)
    observer(model=model, optimizer=optimizer, iteration=iteration, pg_collection=pg_collection)
    optimizer.step()

Iterations count from zero and are recorded as steps from one, as Megatron reports its metrics: an interval of 2 is due
first in the second iteration, as step 2.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

from torch import nn

from telemetry.collect.report import SessionReport
from telemetry.collect.session import Session
from telemetry.collect.watch import watch
from telemetry.errors import ConfigurationError
from telemetry.layout import ParallelLayout
from telemetry.protocol import Aggregator

__all__ = ["SOURCE_KINDS", "MegatronObserver", "build", "parse_specs"]

SOURCE_KINDS: Final = (
    "residual_accumulator",
    "residual_contribution",
    "output_logits",
    "mtp_logits",
    "router_logits",
    "router_scores",
    "router_diagnostics",
)
"""Source kinds of the call sites in Megatron Core."""

# Updates are not among them: the loop calls before the optimizer steps, and not after.
_SIGNALS: Final = ("activations", "activation_grads", "parameters", "gradients")


def parse_specs(specs: Sequence[str]) -> dict[str, int]:
    """Return name → interval in iterations.

    Args:
        specs: ``NAME:INTERVAL``, a signal other than ``updates`` or one of :data:`SOURCE_KINDS`.

    Raises:
        ConfigurationError: a spec is malformed, its name is unknown or comes twice, or its interval is not a positive
            whole number.

    Example:
        >>> parse_specs(["gradients:50", "router_logits:100"])
        {'gradients': 50, 'router_logits': 100}
    """
    found: dict[str, int] = {}
    for spec in specs:
        name, separator, interval = spec.strip().rpartition(":")
        if not separator or not name:
            raise ConfigurationError(f"the spec {spec!r} is not NAME:INTERVAL", remedy="write it as gradients:50")
        if name not in (*_SIGNALS, *SOURCE_KINDS):
            raise ConfigurationError(
                f"the spec {spec!r} names {name!r}; there are {', '.join((*_SIGNALS, *SOURCE_KINDS))}",
                remedy="choose from these names",
            )
        if name in found:
            raise ConfigurationError(f"{name!r} has two specs", remedy="give each name one interval")
        if not interval.isdecimal() or int(interval) < 1:
            raise ConfigurationError(
                f"the interval of {name!r} is {interval!r}", remedy="give a whole number of iterations, 1 or more"
            )
        found[name] = int(interval)
    return found


def build(specs: Sequence[str], *, to: str | os.PathLike[str] | Aggregator, **options: Any) -> MegatronObserver | None:
    """Make the observer of a Megatron training loop; every rank does, with the same arguments.

    Args:
        specs: see :func:`parse_specs`; none make no observer.
        to: where the record goes, as for ``telemetry.watch``.
        options: further arguments of ``telemetry.watch``, for instance ``sinks`` or ``select``.

    Returns:
        The observer, or None if there are no specs, as Megatron's own function does.

    Raises:
        ConfigurationError: a spec is wrong, or an option is one that the specs decide.
    """
    every = parse_specs(specs)
    decided = {"model", "optimizer", "signals", "call_sites", "every", "first_step", "last_step", "layout"} & set(
        options
    )
    if decided:
        raise ConfigurationError(
            f"the specs and the training loop decide {', '.join(sorted(decided))}", remedy="leave them out"
        )
    return MegatronObserver(every, to, options) if every else None


class MegatronObserver:
    """One session in the hands of Megatron's training loop; made by :func:`build`.

    The session attaches in the first iteration, when model and process groups are there.
    """

    def __init__(
        self, every: Mapping[str, int], to: str | os.PathLike[str] | Aggregator, options: Mapping[str, Any]
    ) -> None:
        self._every = dict(every)
        self._to = to
        self._options = dict(options)
        self._session: Session | None = None
        self._scope: AbstractContextManager[Any] | None = None

    @property
    def session(self) -> Session | None:
        """The session, None before the first iteration."""
        return self._session

    @contextmanager
    def observe_forward_backward(
        self, *, model: Sequence[nn.Module], iteration: int | None, pg_collection: Any
    ) -> Iterator[None]:
        """Observe what happens in the block: all micro-batches of an iteration.

        A block that is entered again for the same iteration replaces what the earlier one has seen, as when Megatron
        reruns an iteration to tell a fault of the hardware from one of the software.

        Args:
            model: the chunks of this rank, as the loop calls them.
            iteration: counted from zero.
            pg_collection: the process groups of the model.

        Raises:
            RankfoldError: in the first iteration, whatever ``telemetry.watch`` refuses.
            ConfigurationError: there is no iteration.
        """
        session = self._attached(model, pg_collection)
        self._abandon()
        self._scope = session.step(_step_of(iteration))
        self._scope.__enter__()
        try:
            with _megatron_scope(session, self._every):
                yield
        except BaseException:
            self._abandon()
            raise

    def __call__(
        self, *, model: Sequence[nn.Module], optimizer: Any, iteration: int | None, pg_collection: Any
    ) -> None:
        """Record the iteration; called before the optimizer steps, when gradients are final.

        Args:
            model, iteration, pg_collection: as for the block.
            optimizer: not used; gradients are read where the parameters hold them, in ``grad`` or ``main_grad``.
        """
        scope, self._scope = self._scope, None
        if scope is None:
            raise ConfigurationError(
                f"iteration {iteration} was not observed",
                remedy="enter observe_forward_backward around the forward-backward function",
            )
        scope.__exit__(None, None, None)

    def close(self) -> SessionReport | None:
        """End the session and return its report, None if no iteration came."""
        self._abandon()
        if self._session is None:
            return None
        self._session.close()
        return self._session.report

    def _attached(self, model: Sequence[nn.Module], pg_collection: Any) -> Session:
        if self._session is None:
            self._session = watch(
                tuple(model),
                to=self._to,
                signals=[name for name in self._every if name in _SIGNALS],
                call_sites=[name for name in self._every if name in SOURCE_KINDS],
                every=self._every,
                first_step=False,
                layout=ParallelLayout.from_process_groups(pg_collection),
                **self._options,
            )
        return self._session

    def _abandon(self) -> None:
        scope, self._scope = self._scope, None
        if scope is not None:
            # A scope that is left by an exception records nothing.
            scope.__exit__(InterruptedError, InterruptedError(), None)


def _step_of(iteration: int | None) -> int:
    if iteration is None:
        raise ConfigurationError("there is no iteration", remedy="pass the training iteration, counted from zero")
    return iteration + 1


def _megatron_scope(session: Session, every: Mapping[str, int]) -> AbstractContextManager[None]:
    """Let Megatron's own call sites reach the session; our own do by the step scope."""
    try:
        from megatron.core import tensor_observation
    except ImportError:
        return nullcontext()
    kinds = frozenset(name for name in every if name in SOURCE_KINDS)
    scope: AbstractContextManager[None] = tensor_observation.capture_tensor_observations(session.observer, kinds)
    return scope
