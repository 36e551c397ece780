"""The live session of one rank: opens step scopes, drives the observers, hands packets over."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import nn

from telemetry.collect.activations import ActivationObserver
from telemetry.collect.amp import NO_SCALER, UNKNOWN, UNSCALED, ScalerView
from telemetry.collect.book import LocalSite
from telemetry.collect.boundary import OptimizerBoundary
from telemetry.collect.budget import CostBudget
from telemetry.collect.call_sites import CallSiteObserver
from telemetry.collect.clock import SelfTime
from telemetry.collect.implicit import ImplicitSteps, StepSource
from telemetry.collect.observations import DrainedStep, Observations, Origin
from telemetry.collect.parameters import ParameterObserver
from telemetry.collect.plan import Plan
from telemetry.collect.registry import release_model
from telemetry.collect.report import SessionReport
from telemetry.collect.schedule import ANY_KIND, Schedule
from telemetry.errors import RankfoldError, SessionClosedError, SessionNestingError, StepOrderError
from telemetry.packet import StepFacts
from telemetry.presence import Presence
from telemetry.protocol import Aggregator
from telemetry.sites import KIND_OF_SIGNAL

__all__ = ["Session", "StepScope"]

_WEIGHT_REASONS = {
    "gradient": "the gradient is None",
    "update": "no optimizer stepped",
    "parameter": "the parameter was not read",
}

# Kinds that come with a signal beside its own.
_SIGNAL_OF_KIND = {kind: signal for signal, kind in KIND_OF_SIGNAL.items()} | dict.fromkeys(
    ("gradient_pre_clip", "gradient_stored"), "gradients"
)


class Session:
    """A watched model on one rank. Every rank of the job holds one and opens the same step scopes.

    Made by :func:`telemetry.watch`; use it as a context manager, or call :meth:`close`.

    Attributes:
        plan: what is observed and what it costs, see :class:`Plan`.
    """

    def __init__(
        self,
        *,
        chunks: tuple[nn.Module, ...],
        name: str,
        schedule: Schedule,
        aggregator: Aggregator,
        origin: Origin,
        plan: Plan,
        observations: Observations,
        activations: ActivationObserver,
        parameters: ParameterObserver,
        call_sites: CallSiteObserver,
        clock: SelfTime,
        optimizers: tuple[Any, ...],
        budget: CostBudget | None = None,
        step_source: StepSource | None = None,
    ) -> None:
        self.plan = plan
        self._chunks = chunks
        self._name = name
        self._schedule = schedule
        self._aggregator = aggregator
        self._origin = origin
        self._observations = observations
        self._activations = activations
        self._parameters = parameters
        self._call_sites = call_sites
        self._clock = clock
        self._budget = budget
        self._boundary = OptimizerBoundary(optimizers, before=self._before_optimizer, after=self._after_optimizer)
        self._boundary.install()

        self._due: frozenset[str] = frozenset()
        self._scaler = ScalerView(None)
        self._scale_states: set[str] = set()
        self._last_step: int | None = None
        self._in_step = False
        self._report: SessionReport | None = None
        self._tally: Counter[tuple[str, Presence]] = Counter()
        self._num_steps = self._num_logged = self._num_unlogged = 0
        self._self_s = self._step_s = 0.0
        self._implicit = None if step_source is None else ImplicitSteps(self, chunks[0], step_source)

    @property
    def run_id(self) -> str:
        """Identity of the run that the session writes to."""
        return self._origin.run_id

    @property
    def failure(self) -> RankfoldError | None:
        """Why the merge has stopped, or None while it runs; steps that are due after it are not recorded."""
        return self._aggregator.failure

    @property
    def observer(self) -> Callable[..., None]:
        """A listener of call sites, for scopes that others open; outside of due steps it does nothing.

        Example:
            ``with megatron.core.tensor_observation.capture_tensor_observations(session.observer, kinds): …``
        """
        return self._call_sites.listener

    @property
    def report(self) -> SessionReport:
        """The close report.

        Raises:
            SessionClosedError: the session is still open, so there is none yet.
        """
        if self._report is None:
            raise SessionClosedError("the session is still open", remedy="read session.report after session.close()")
        return self._report

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._implicit is not None:
            # The step that an exception has broken off is not one that the loop has made.
            self._implicit.close(record=kind is None)
        self.close()

    def can_open(self, step: int) -> bool:
        """Tell whether :meth:`step` would accept the number now."""
        return self._refusal(step, new_segment=False) is None

    def step(self, step: int, *, scaler: Any = None, new_segment: bool = False) -> StepScope:
        """Return the scope of one optimizer step; every rank opens it with the same number.

        What happens inside of the scope belongs to ``step``: all micro-batches, the backward passes, the optimizer. A
        scope that is left by an exception records nothing and lets the exception pass.

        Args:
            step: the caller's optimizer-step number, larger than the one before.
            scaler: the ``GradScaler`` of the loop, if there is one.
            new_segment: begin a new segment of the run with this step, as a loop does that has gone back to a
                checkpoint. What the record holds from this step on is superseded, not deleted. Given by every rank, at
                this one step.

        Raises:
            StepOrderError: the number repeats or goes back.
            SessionNestingError: another scope is open.
            SessionClosedError: the session was closed.

        Example:
            ``with session.step(step): train_one(batch)``
        """
        if (refusal := self._refusal(step, new_segment=new_segment)) is not None:
            raise refusal
        return StepScope(self, step, scaler, new_segment=new_segment)

    def _refusal(self, step: int, *, new_segment: bool) -> RankfoldError | None:
        if self._report is not None:
            return SessionClosedError("the session is closed", step=step, remedy="open steps inside of the session")
        if self._in_step:
            return SessionNestingError(
                "a step scope is open already", step=step, remedy="end one step before the next begins"
            )
        if self._last_step is not None and step <= self._last_step and not new_segment:
            return StepOrderError(
                f"step {step} came after step {self._last_step}",
                rank=self._origin.rank,
                step=step,
                remedy="count optimizer steps upwards; a loop that goes back to a checkpoint gives new_segment=True, "
                "a new process resume_step",
            )
        return None

    def close(self) -> None:
        """End observation, deliver what is in flight and make the report. Safe to call again; never raises."""
        if self._report is not None:
            return
        if self._implicit is not None:
            self._implicit.close(record=True)
        self._boundary.remove()
        self._call_sites.close()
        self._activations.detach()
        self._parameters.forget_snapshots()
        release_model(self._chunks, self._name)
        self._report = SessionReport(
            to=self.plan.to,
            rank=self._origin.rank,
            world_size=self._origin.world_size,
            num_steps=self._num_steps,
            num_logged=self._num_logged,
            num_unlogged=self._num_unlogged,
            observations=dict(self._tally),
            never_ran=self._activations.never_ran() if self._num_logged else (),
            never_met=self._call_sites.never_met() if self._num_logged else (),
            self_s=self._self_s,
            step_s=self._step_s,
            num_passed_over=self._implicit.num_passed_over if self._implicit else 0,
            step_source_failure=self._implicit.failure if self._implicit else "",
            merge=self._aggregator.close(),
        )

    # Called by the step scope and by the optimizer's hooks, on the training thread.

    def _open_step(self, step: int, scaler: Any, *, new_segment: bool) -> None:
        self._in_step = True
        self._clock.reset()
        with self._clock:
            if new_segment:
                self._last_step = None
                self._origin = self._origin.in_next_segment(step)
            is_first = self._last_step is None
            self._due = self._schedule.due(step, is_first=is_first)
            if self._due and self._aggregator.failure is not None:
                self._num_unlogged += 1
                self._due = frozenset()
            if self._due:
                self._scaler, self._scale_states = ScalerView(scaler), set()
                self._prepare(step, is_first=is_first)

    def _prepare(self, step: int, *, is_first: bool) -> None:
        self._boundary.num_steps = 0
        histogram = self._schedule.histogram_due(step, is_first=is_first)
        left_out = frozenset[LocalSite]()
        if self._budget is not None:
            left_out = self._budget.choose(step, self._schedules, histogram=histogram)
        self._observations.begin(histogram=histogram, left_out=left_out)
        for kind, reason in _WEIGHT_REASONS.items():
            if f"{kind}s" in self._due:
                self._parameters.expect(kind, reason)
        self._activations.install(activations="activations" in self._due, gradients="activation_grads" in self._due)
        self._call_sites.open(self._due, traced=not self._activations.compile_obstacle)
        if "updates" in self._due and not len(self._boundary):
            self._parameters.snapshot()

    def _schedules(self, site: LocalSite) -> bool:
        kind = site.spec.kind
        return _SIGNAL_OF_KIND.get(kind, kind) in self._due or (kind not in _SIGNAL_OF_KIND and ANY_KIND in self._due)

    def _before_optimizer(self, optimizer: Any, parameter_ids: frozenset[int]) -> None:
        if not self._in_step or not self._due:
            return
        with self._clock:
            scale = self._scaler.at_boundary(optimizer)
            self._scale_states.add(scale.state)
            if "gradients" in self._due:
                self._parameters.observe_gradients(parameter_ids, divisor=scale.divisor)
            if "updates" in self._due:
                self._parameters.snapshot(parameter_ids)

    def _after_optimizer(self, used_closure: bool) -> None:
        if used_closure and self._in_step and "gradients" in self._due:
            with self._clock:
                self._parameters.observe_gradients(only_missing=True)

    def _before_clipping(self) -> None:
        if self._in_step and "gradients" in self._due:
            with self._clock:
                self._parameters.observe_gradients_before_clipping()

    def _close_step(self, step: int, started: float) -> None:
        self._in_step = False
        self._last_step = step
        self._num_steps += 1
        if not self._due:
            return
        with self._clock:
            self._call_sites.close()
            self._activations.mark_old_graphs()
            self._activations.remove()
            skipped = self._scaler.skipped(self._boundary.optimizers, self._boundary.num_steps)
            self._read_weights(skipped=skipped)
            for key, count in self._observations.tally().items():
                self._tally[key] += count
            drained = self._observations.drain()
        facts = self._facts(drained, started, skipped=skipped)
        with self._clock:
            self._aggregator.submit(drained.to_packet(step, self._origin, facts))
        if self._budget is not None:
            self._budget.settle(self._clock.seconds)
        self._num_logged += 1
        self._self_s += self._clock.seconds
        self._step_s += time.perf_counter() - started

    def _read_weights(self, *, skipped: bool) -> None:
        if "gradients" in self._due:
            self._parameters.observe_gradients(only_missing=True)
        if "updates" in self._due and skipped:
            self._parameters.forget_snapshots("skipped: the scaler found non-finite gradients")
        elif "updates" in self._due:
            self._parameters.observe_updates()
        if "parameters" in self._due:
            self._parameters.observe_values()

    def _abandon_step(self) -> None:
        self._in_step = False
        self._call_sites.close()
        self._activations.remove()
        self._observations.discard()
        self._parameters.forget_snapshots()

    def _facts(self, drained: DrainedStep, started: float, *, skipped: bool) -> StepFacts:
        stepped = self._boundary.num_steps > 0 and not skipped
        return StepFacts(
            num_applied=int(stepped),
            num_skipped=int(skipped),
            num_unknown=int(not stepped and not skipped),
            num_micro_batches=(self._implicit or self._activations).num_forwards,
            num_optimizer_steps=self._boundary.num_steps,
            provenance="explicit" if self._implicit is None else "implicit",
            grad_scale=self._scaler.scale,
            grad_scale_state=self._scale_state(skipped=skipped),
            mode="train" if self._chunks[0].training else "eval",
            wall_time_s=time.time(),
            step_s=time.perf_counter() - started,
            self_s=self._clock.seconds,
            skipped_ranks=(self._origin.rank,) if skipped else (),
            read_bytes=drained.read_bytes,
            transfer_s=drained.transfer_s,
            transfer_bytes=drained.transfer_bytes,
            num_budget_dropped=drained.num_budget_dropped,
        )

    def _scale_state(self, *, skipped: bool) -> str:
        # A scaler can only know that it has to skip a step after it has unscaled the gradients.
        states = self._scale_states or {NO_SCALER if self._scaler.scale is None else UNSCALED if skipped else UNKNOWN}
        return states.pop() if len(states) == 1 else "mixed"


class StepScope:
    """``with session.step(n):`` — a plain object, because a generator would cost off cadence."""

    __slots__ = ("_new_segment", "_scaler", "_session", "_started", "_step")

    def __init__(self, session: Session, step: int, scaler: Any, *, new_segment: bool) -> None:
        self._session = session
        self._step = step
        self._scaler = scaler
        self._new_segment = new_segment
        self._started = 0.0

    def __enter__(self) -> StepScope:
        self._started = time.perf_counter()
        self._session._open_step(self._step, self._scaler, new_segment=self._new_segment)
        return self

    def before_clipping(self) -> None:
        """Observe the gradients as they are now as a stage of their own, the kind ``gradient_pre_clip``.

        Call it between backward (with a scaler, after ``unscale_``) and the clipping; the kind ``gradient`` shows what
        the optimizer uses. Does nothing where the gradients are not due.
        """
        self._session._before_clipping()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self._session._close_step(self._step, self._started)
        else:
            self._session._abandon_step()
