"""``watch``: everything that can be refused is refused here, on all ranks together, before training begins."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from telemetry.collect.implicit import StepSource
from telemetry.collect.names import NameRule, as_chunks
from telemetry.collect.observations import Origin
from telemetry.collect.placing import DeclaredPlacements
from telemetry.collect.plan import Plan
from telemetry.collect.preparation import Preparation, Request, try_prepare, without_observation
from telemetry.collect.registry import release_model
from telemetry.collect.run_record import run_record
from telemetry.collect.schedule import Schedule
from telemetry.collect.select import Selector
from telemetry.collect.session import Session
from telemetry.collect.settings import UNSET, Unset, resolve_settings
from telemetry.errors import AggregatorUnavailableError, RankfoldError
from telemetry.layout import ParallelLayout
from telemetry.process import rank_and_world_size
from telemetry.protocol import Aggregator, AttachOffer, Deadlines, load_aggregator
from telemetry.summary.histogram import DEFAULT_DESCRIPTOR, HistogramDescriptor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["watch"]


def watch(
    model: nn.Module | Sequence[nn.Module],
    *,
    to: str | os.PathLike[str] | Aggregator | Unset = UNSET,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    signals: Sequence[str] | Unset = UNSET,
    call_sites: Sequence[str] = (),
    select: Selector | Sequence[Selector] | Unset = UNSET,
    exclude: Selector | Sequence[Selector] | Unset = UNSET,
    every: int | Mapping[str, int] | Unset = UNSET,
    hist_every: int | Unset | None = UNSET,
    layout: ParallelLayout | DeviceMesh | None = None,
    placements: DeclaredPlacements | None = None,
    experts: Sequence[str] = (),
    reduce_partial: bool = False,
    site_names: NameRule | None = None,
    sinks: Sequence[Any] = (),
    step: StepSource | None = None,
    name: str = "default",
    resume_step: int | None = None,
    first_step: bool = True,
    last_step: int | Unset | None = UNSET,
    due_offset: int = 0,
    full_updates: bool | Unset = UNSET,
    budget_ms: float | Unset | None = UNSET,
    health: Any = UNSET,
    descriptor: HistogramDescriptor = DEFAULT_DESCRIPTOR,
    deadlines: Deadlines | None = None,
) -> Session:
    """Begin to observe a model. Called by every rank, after the process group and the wrappers are in place.

    An argument whose default is ``UNSET`` can also be set by an environment variable or in a settings file, see
    ``docs/reference/settings.md``; the plan shows where each setting came from. ``RANKFOLD_DISABLE=1`` turns the
    session off on all ranks.

    Args:
        model: the module that the loop calls, wrapped or not; several where a rank holds virtual pipeline stages.
        to: a directory for the record, the same on every rank, where only rank zero writes; ``ray://NAME``; or an
            aggregator object.
        optimizer: the optimizer or optimizers of the model. Without one, the step scope is the boundary: gradients
            are read at its end, and updates are the difference over the scope.
        signals: which of ``telemetry.SIGNALS`` to observe, all of them by default; may be empty.
        call_sites: source kinds of ``telemetry.observe_tensor`` calls to observe.
        select, exclude: modules and parameters by name glob, compiled regular expression, module class or predicate.
        every: interval in steps, 50 by default, for all, or by signal and kind of call sites; the first and the
            last step are always logged.
        hist_every: interval of histograms in steps, 200 by default, None for none.
        layout: the named axes of the job, or its ``DeviceMesh``. Left out, it is that of the mesh which the model's
            DTensors use, and where there are none, one data-parallel axis is assumed and recorded.
        placements: glob of site names, or (kind, glob) → axis → placement, for tensors whose placement neither a
            DTensor nor their source kind tells.
        experts: globs of the names of expert weights, which lie on the expert grid of the layout.
        reduce_partial: reduce a copy of DTensors that are partial sums, with a collective inside of the due step;
            without it they are refused, because a partial value is no sample of the tensor.
        site_names: local name → model-wide name, for pipeline stages that number their layers from zero. Without it
            Megatron's layer numbers are used, or the number of the stage is put in front.
        sinks: where else the record goes, opened on rank zero only.
        step: for a loop that cannot be changed, a callable that returns the number of the optimizer step that the
            coming forward pass belongs to; takes the place of ``session.step``.
        name: distinguishes several sessions on one model.
        resume_step: continue the run that ``to`` holds, as a new segment that begins at this step.
        first_step: whether the first step that the session sees is logged whatever its number.
        last_step: the run's last step if known, so that it is logged.
        due_offset: added to a step number before it is compared with the intervals: 1 for a loop that counts from
            zero and reports after every n-th step, so that ``every=10`` means the steps 9, 19, 29.
        full_updates: follow every element of a parameter, not at most 4096 of each; costs a copy of the parameters.
        budget_ms: the most that observing may take of a logged step, in milliseconds on the host; None for no limit.
            Kept by what earlier steps took: sites that do not fit are left out, another part of them at each step, and
            their rows say ``budget_dropped``. The first logged step measures and leaves nothing out.
        health: built-in checks of the merged steps: True, False, or an ``aggregator.health.Thresholds``.
        descriptor: the histogram grid.
        deadlines: how long to wait for other ranks.

    Returns:
        The session; leave its ``with`` block or call ``close`` to end it.

    Raises:
        RankfoldError: a subclass that tells what is wrong on which rank; every rank raises it, none is left waiting.
    """
    rank, world_size = rank_and_world_size()
    given = {
        "to": to,
        "signals": signals,
        "select": select,
        "exclude": exclude,
        "every": every,
        "hist_every": hist_every,
        "last_step": last_step,
        "full_updates": full_updates,
        "budget_ms": budget_ms,
        "health": health,
    }
    settings = resolve_settings(given, os.environ, Path())
    request = Request(
        chunks=as_chunks(model),
        optimizers=optimizer,
        signals=settings["signals"],
        call_sites=call_sites,
        select=settings["select"],
        exclude=settings["exclude"],
        every=settings["every"],
        hist_every=settings["hist_every"],
        first_step=first_step,
        last_step=settings["last_step"],
        due_offset=due_offset,
        layout=layout,
        placements=placements,
        experts=experts,
        reduce_partial=reduce_partial,
        site_names=site_names,
        full_updates=settings["full_updates"],
        budget_ms=settings["budget_ms"],
        descriptor=descriptor,
        name=name,
        rank=rank,
        world_size=world_size,
        settings=settings,
    )
    if settings.is_disabled:
        request = without_observation(request)
    aggregator, destination, failure = _resolve_destination(settings["to"])
    # A rank that has to refuse still goes to the agreement, or the others would wait for it there.
    prepared, refusal = try_prepare(request)
    failure = settings.failure or failure or refusal
    if failure is not None:
        settings.explain(failure)
    try:
        reply = aggregator.attach(
            AttachOffer(
                rank=rank,
                world_size=world_size,
                to=destination,
                run=run_record(request, prepared) if prepared else {},
                descriptor=descriptor,
                sites=prepared.book.take_unsent() if prepared else (),
                sinks=tuple(sinks),
                resume_step=resume_step,
                deadlines=deadlines or Deadlines(),
                failure=None if settings.is_disabled else failure,
                cadence=_cadence(prepared.schedule, request) if prepared else {},
                disabled_by=(rank,) if settings.is_disabled else (),
                health=settings["health"],
            )
        )
    except BaseException:
        if prepared:
            release_model(request.chunks, name)
        raise
    if reply.disabled_by and not settings.is_disabled:
        if prepared:
            release_model(request.chunks, name)
        request = without_observation(request)
        prepared, _ = try_prepare(request)
    assert prepared is not None, "an aggregator accepted the offer of a rank that had refused"
    prepared.activations.attach()
    origin = Origin(reply.run_id, reply.segment, rank, world_size)
    plan = replace(
        prepared.plan(request, origin, destination),
        disabled_by=tuple(reply.disabled_by) or ((rank,) if settings.is_disabled else ()),
        unrecorded=reply.unrecorded,
    )
    return _session(request, prepared, aggregator, origin, plan, step)


def _cadence(schedule: Schedule, request: Request) -> dict[str, Any]:
    return {
        "every": dict(schedule.every),
        "hist_every": schedule.hist_every,
        "last_step": schedule.last_step,
        "offset": schedule.offset,
        "budget_ms": request.budget_ms,
    }


def _resolve_destination(
    to: str | os.PathLike[str] | Aggregator | None,
) -> tuple[Aggregator, str, RankfoldError | None]:
    """Return the aggregator, its destination, and what is wrong with it, if anything."""
    if to is not None and not isinstance(to, str | os.PathLike):
        return to, str(to), None
    destination = "" if to is None else os.fspath(to)
    try:
        return load_aggregator(destination), destination, None
    except AggregatorUnavailableError as error:
        # The others may well find theirs: say so where ranks of this installation would meet.
        return load_aggregator(""), "", error


def _session(
    request: Request,
    prepared: Preparation,
    aggregator: Aggregator,
    origin: Origin,
    plan: Plan,
    step_source: StepSource | None,
) -> Session:
    return Session(
        chunks=request.chunks,
        name=request.name,
        schedule=prepared.schedule,
        aggregator=aggregator,
        origin=origin,
        plan=plan,
        observations=prepared.observations,
        activations=prepared.activations,
        parameters=prepared.parameters,
        call_sites=prepared.call_sites,
        clock=prepared.clock,
        optimizers=prepared.optimizers,
        budget=prepared.budget,
        step_source=step_source,
    )
