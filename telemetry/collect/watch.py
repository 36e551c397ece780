"""``watch``: everything that can be refused is refused here, on all ranks together, before training begins."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from telemetry.collect.activations import ActivationObserver
from telemetry.collect.book import SiteBook
from telemetry.collect.clock import SelfTime
from telemetry.collect.names import ModelNames, NameRule, as_chunks, unwrapped
from telemetry.collect.observations import Observations, Origin
from telemetry.collect.parameters import UPDATE_SAMPLE_SIZE, ParameterObserver
from telemetry.collect.placing import DeclaredPlacements, PlacementRules
from telemetry.collect.plan import Plan, PlannedSignal
from telemetry.collect.registry import claim_model, release_model
from telemetry.collect.schedule import DEFAULT_EVERY, DEFAULT_HIST_EVERY, Schedule
from telemetry.collect.select import Selection, Selector
from telemetry.collect.session import Session
from telemetry.dtensor import layout_of
from telemetry.errors import ConfigurationError, NothingSelectedError, RankfoldError
from telemetry.layout import ParallelLayout
from telemetry.process import rank_and_world_size
from telemetry.protocol import Aggregator, AttachOffer, Deadlines, load_aggregator
from telemetry.sites import KIND_OF_SIGNAL, SIGNALS, SiteSpec
from telemetry.summary.aten import REDUCTION_DTYPE
from telemetry.summary.histogram import DEFAULT_DESCRIPTOR, HistogramDescriptor
from telemetry.version import VERSION

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["watch"]


def watch(
    model: nn.Module | Sequence[nn.Module],
    *,
    to: str | os.PathLike[str] | Aggregator,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    signals: Sequence[str] = SIGNALS,
    select: Selector | Sequence[Selector] = "*",
    exclude: Selector | Sequence[Selector] = (),
    every: int | Mapping[str, int] = DEFAULT_EVERY,
    hist_every: int | None = DEFAULT_HIST_EVERY,
    layout: ParallelLayout | DeviceMesh | None = None,
    placements: DeclaredPlacements | None = None,
    experts: Sequence[str] = (),
    reduce_partial: bool = False,
    site_names: NameRule | None = None,
    sinks: Sequence[Any] = (),
    name: str = "default",
    resume_step: int | None = None,
    last_step: int | None = None,
    full_updates: bool = False,
    descriptor: HistogramDescriptor = DEFAULT_DESCRIPTOR,
    deadlines: Deadlines | None = None,
) -> Session:
    """Begin to observe a model. Called by every rank, after the process group and the wrappers are in place.

    Args:
        model: the module that the loop calls, wrapped or not; several where a rank holds virtual pipeline stages.
        to: a directory for the record, the same on every rank, where only rank zero writes; ``ray://NAME``; or an
            aggregator object.
        optimizer: the optimizer or optimizers of the model. Without one, the step scope is the boundary: gradients
            are read at its end, and updates are the difference over the scope.
        signals: which of ``telemetry.SIGNALS`` to observe; may be empty.
        select, exclude: modules and parameters by name glob, compiled regular expression, module class or predicate.
        every: interval in steps, for all signals or by signal; the first and last step are always logged.
        hist_every: interval of histograms in steps, None for none.
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
        name: distinguishes several sessions on one model.
        resume_step: continue the run that ``to`` holds, as a new segment that begins at this step.
        last_step: the run's last step if known, so that it is logged.
        full_updates: follow every element of a parameter, not at most 4096 of each; costs a copy of the parameters.
        descriptor: the histogram grid.
        deadlines: how long to wait for other ranks.

    Returns:
        The session; leave its ``with`` block or call ``close`` to end it.

    Raises:
        RankfoldError: a subclass that tells what is wrong on which rank; every rank raises it, none is left waiting.
    """
    rank, world_size = rank_and_world_size()
    request = _Request(
        chunks=as_chunks(model),
        optimizers=_as_optimizers(optimizer),
        signals=signals,
        select=select,
        exclude=exclude,
        every=every,
        hist_every=hist_every,
        last_step=last_step,
        layout=_resolve_layout(layout, as_chunks(model), world_size),
        placements=placements,
        experts=experts,
        reduce_partial=reduce_partial,
        site_names=site_names,
        full_updates=full_updates,
        descriptor=descriptor,
        name=name,
        rank=rank,
        world_size=world_size,
    )
    aggregator, destination = _resolve_destination(to)
    # A rank that has to refuse still goes to the agreement, or the others would wait for it there.
    prepared, failure = _try_prepare(request)
    try:
        reply = aggregator.attach(
            AttachOffer(
                rank=rank,
                world_size=world_size,
                to=destination,
                run=_run_record(request, prepared),
                descriptor=descriptor,
                sites=prepared.book.take_unsent() if prepared else (),
                sinks=tuple(sinks),
                resume_step=resume_step,
                deadlines=deadlines or Deadlines(),
                failure=failure,
            )
        )
    except BaseException:
        if prepared:
            release_model(request.chunks, name)
        raise
    assert prepared is not None, "an aggregator accepted the offer of a rank that had refused"
    origin = Origin(reply.run_id, reply.segment, rank, world_size)
    return _session(request, prepared, aggregator, origin, destination)


@dataclass(frozen=True)
class _Request:
    chunks: tuple[nn.Module, ...]
    optimizers: tuple[Optimizer, ...]
    signals: Sequence[str]
    select: Selector | Sequence[Selector]
    exclude: Selector | Sequence[Selector]
    every: int | Mapping[str, int]
    hist_every: int | None
    last_step: int | None
    layout: ParallelLayout
    placements: DeclaredPlacements | None
    experts: Sequence[str]
    reduce_partial: bool
    site_names: NameRule | None
    full_updates: bool
    descriptor: HistogramDescriptor
    name: str
    rank: int
    world_size: int


@dataclass(frozen=True)
class _Prepared:
    schedule: Schedule
    selection: Selection
    book: SiteBook
    observations: Observations
    activations: ActivationObserver
    parameters: ParameterObserver
    clock: SelfTime


def _resolve_destination(to: str | os.PathLike[str] | Aggregator) -> tuple[Aggregator, str]:
    if isinstance(to, str | os.PathLike):
        return load_aggregator(os.fspath(to)), os.fspath(to)
    return to, str(to)


def _resolve_layout(
    given: ParallelLayout | DeviceMesh | None, chunks: Sequence[nn.Module], world_size: int
) -> ParallelLayout:
    if isinstance(given, ParallelLayout):
        return given
    if given is not None:
        return ParallelLayout.from_mesh(given)
    tensors = [parameter for chunk in chunks for parameter in chunk.parameters()]
    return layout_of(tensors, world_size) or ParallelLayout.assumed(world_size)


def _try_prepare(request: _Request) -> tuple[_Prepared | None, RankfoldError | None]:
    try:
        return _prepare(request), None
    except RankfoldError as error:
        error.rank = request.rank
        return None, error
    except Exception as error:  # a user's predicate, for instance; the other ranks must hear of it as well
        refusal = ConfigurationError(
            f"{type(error).__name__} while the session was prepared: {error}", rank=request.rank
        )
        refusal.__cause__ = error
        return None, refusal


def _prepare(request: _Request) -> _Prepared:
    schedule = Schedule.build(request.signals, request.every, request.hist_every, request.last_step)
    request.layout.require_world_size(request.world_size)
    selection = Selection(request.select, request.exclude)
    rules = PlacementRules(request.layout, request.placements, request.experts, reduce_partial=request.reduce_partial)
    book, clock = SiteBook(rules, request.layout, request.rank), SelfTime()
    observations = Observations(book, request.descriptor)
    names = ModelNames(request.chunks, rule=request.site_names, stage=_stage(request))
    activations = ActivationObserver(request.chunks[0], names, selection, book, observations, clock)
    parameters = ParameterObserver(
        names,
        selection,
        book,
        observations,
        signals=tuple(schedule.every),
        full_updates=request.full_updates,
    )
    _require_matches(names, schedule, selection, activations, parameters)
    claim_model(request.chunks, request.name)
    return _Prepared(schedule, selection, book, observations, activations, parameters, clock)


def _stage(request: _Request) -> int | None:
    sizes = dict(request.layout.axes)
    return request.layout.coordinates(request.rank)["pp"] if sizes.get("pp", 1) > 1 else None


def _require_matches(
    names: ModelNames,
    schedule: Schedule,
    selection: Selection,
    activations: ActivationObserver,
    parameters: ParameterObserver,
) -> None:
    wants_modules = [s for s in ("activations", "activation_grads") if s in schedule.every]
    wants_weights = [s for s in ("parameters", "gradients", "updates") if s in schedule.every]
    for wanted, found in ((wants_modules, activations.num_modules), (wants_weights, len(parameters.parameters))):
        if wanted and not found:
            weights = [name for name, *_ in names.parameters()]
            raise NothingSelectedError(
                f"select {selection} matches nothing for {', '.join(wanted)}; the model has {names.census()}; "
                f"{len(weights)} parameters" + (f" (such as {weights[0]!r})" if weights else ""),
                remedy="choose a pattern that matches these names, or leave the signal out",
            )


def _as_optimizers(optimizer: Optimizer | Sequence[Optimizer] | None) -> tuple[Optimizer, ...]:
    if optimizer is None:
        return ()
    given = tuple(optimizer) if isinstance(optimizer, Sequence) else (optimizer,)
    for one in given:
        if not hasattr(one, "register_step_pre_hook"):
            raise ConfigurationError(
                f"optimizer is a {type(one).__name__}, which has no step hooks",
                remedy="give torch.optim.Optimizer objects, or leave optimizer out",
            )
    return given


def _run_record(request: _Request, prepared: _Prepared | None) -> dict[str, Any]:
    models = [unwrapped(chunk) for chunk in request.chunks]
    return {
        "rankfold": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hostname": platform.node(),
        "command": sys.argv[:1],
        "name": request.name,
        "model": type(models[0]).__name__,
        "num_model_chunks": len(models),
        "model_fingerprint": _fingerprint(models),
        "wrapped_in": type(request.chunks[0]).__name__ if request.chunks[0] is not models[0] else None,
        "world_size": request.world_size,
        "layout": request.layout.to_wire(),
        "every": dict(prepared.schedule.every) if prepared else {},
        "hist_every": request.hist_every,
        "selection": str(prepared.selection) if prepared else "",
        "full_updates": request.full_updates,
        "reduction_dtype": REDUCTION_DTYPE,
        "backend": "aten",
        "gradient_convention": "gradients and activation gradients are those of each rank's own loss, as the loop "
        "scaled it; parameter gradients are read after the reduction over replicas",
    }


def _fingerprint(models: Sequence[nn.Module]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter, *_ in ModelNames(models).parameters():
        shape = "lazy" if isinstance(parameter, nn.parameter.UninitializedParameter) else list(parameter.shape)
        digest.update(f"{name} {parameter.dtype} {shape}\n".encode())
    return digest.hexdigest()


def _session(request: _Request, prepared: _Prepared, aggregator: Aggregator, origin: Origin, to: str) -> Session:
    plan = Plan(
        to=to,
        run_id=origin.run_id,
        segment=origin.segment,
        rank=origin.rank,
        world_size=origin.world_size,
        layout=request.layout,
        signals=tuple(_planned(signal, every, prepared) for signal, every in prepared.schedule.every.items()),
        hist_every=request.hist_every,
        backend="aten",
        selection=str(prepared.selection),
    )
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
        clock=prepared.clock,
        optimizers=request.optimizers,
    )


def _planned(signal: str, every: int, prepared: _Prepared) -> PlannedSignal:
    sites = prepared.book.of_kind(KIND_OF_SIGNAL[signal])
    if signal.startswith("activation"):
        return PlannedSignal(signal, every, prepared.activations.num_modules, None, None)
    num_elements = sum(_observed_elements(site.spec) for site in sites)
    size_bytes = sum(_observed_elements(site.spec) * _itemsize(site.spec.dtype) for site in sites)
    return PlannedSignal(signal, every, len(sites), num_elements, size_bytes)


def _observed_elements(site: SiteSpec) -> int:
    numel = site.numel or 0
    return min(numel, UPDATE_SAMPLE_SIZE) if site.estimated else numel


def _itemsize(dtype: str) -> int:
    return torch.empty(0, dtype=getattr(torch, dtype)).element_size()
