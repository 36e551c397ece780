"""From the arguments of ``watch`` to the parts of a session: where every argument is checked, once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from telemetry.collect.activations import ActivationObserver
from telemetry.collect.book import SiteBook
from telemetry.collect.budget import CostBudget, checked_budget
from telemetry.collect.call_sites import CallSiteObserver
from telemetry.collect.clock import SelfTime
from telemetry.collect.module_output import Capture
from telemetry.collect.names import ModelNames, NameRule
from telemetry.collect.observations import Observations, Origin
from telemetry.collect.parameters import ParameterObserver
from telemetry.collect.placing import DeclaredPlacements, PlacementRules
from telemetry.collect.plan import Plan, PlannedSignal
from telemetry.collect.registry import claim_model
from telemetry.collect.schedule import ANY_KIND, DEFAULT_EVERY, Schedule
from telemetry.collect.select import Selection, Selector
from telemetry.collect.settings import Settings
from telemetry.dtensor import layout_of
from telemetry.errors import ConfigurationError, NothingSelectedError, RankfoldError
from telemetry.layout import ParallelLayout
from telemetry.sites import KIND_OF_SIGNAL, SIGNALS
from telemetry.summary.backend import backend_name
from telemetry.summary.histogram import HistogramDescriptor
from telemetry.torch_internals import is_compiled

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Preparation", "Request", "try_prepare", "without_observation"]


@dataclass(frozen=True)
class Request:
    """The arguments of ``watch`` as they were given, and this rank; see there."""

    chunks: tuple[nn.Module, ...]
    optimizers: Optimizer | Sequence[Optimizer] | None
    signals: Sequence[str]
    call_sites: Sequence[str]
    select: Selector | Sequence[Selector]
    exclude: Selector | Sequence[Selector]
    every: int | Mapping[str, int]
    hist_every: int | None
    first_step: bool
    last_step: int | None
    due_offset: int
    layout: ParallelLayout | DeviceMesh | None
    placements: DeclaredPlacements | None
    experts: Sequence[str]
    reduce_partial: bool
    site_names: NameRule | None
    full_updates: bool
    budget_ms: float | None
    descriptor: HistogramDescriptor
    name: str
    rank: int
    world_size: int
    settings: Settings
    is_disabled: bool = False


@dataclass(frozen=True)
class Preparation:
    """What a rank is ready to observe with, before anything of the model is touched."""

    schedule: Schedule
    layout: ParallelLayout
    selection: Selection
    book: SiteBook
    observations: Observations
    budget: CostBudget | None
    activations: ActivationObserver
    parameters: ParameterObserver
    call_sites: CallSiteObserver
    clock: SelfTime
    optimizers: tuple[Optimizer, ...]
    backend: str

    def plan(self, request: Request, origin: Origin, destination: str) -> Plan:
        """Return the plan of the session, once the run is known."""
        return Plan(
            to=destination,
            run_id=origin.run_id,
            segment=origin.segment,
            rank=origin.rank,
            world_size=origin.world_size,
            layout=self.layout,
            signals=tuple(self._planned(signal, every) for signal, every in self.schedule.every.items()),
            hist_every=request.hist_every,
            budget_ms=request.budget_ms,
            backend=self.backend,
            selection=str(self.selection),
            settings=request.settings.changed,
            compile_obstacle=self.activations.compile_obstacle if is_compiled(request.chunks) else "",
        )

    def _planned(self, signal: str, every: int) -> PlannedSignal:
        if signal.startswith("activation"):
            return PlannedSignal(signal, every, self.activations.num_modules, None, None)
        if signal not in KIND_OF_SIGNAL:
            return PlannedSignal(signal, every, None, None, None)
        num_elements, size_bytes = self.parameters.cost(KIND_OF_SIGNAL[signal])
        return PlannedSignal(signal, every, len(self.parameters.parameters), num_elements, size_bytes)


def without_observation(request: Request) -> Request:
    """Return the request of a session that is turned off: it watches an empty module, so the model is not even read.

    What could be refused is left out as well, because the switch must only ever turn things off.
    """
    return replace(
        request,
        chunks=(nn.Module(),),
        optimizers=None,
        signals=(),
        call_sites=(),
        select=(),
        exclude=(),
        every=DEFAULT_EVERY,
        hist_every=None,
        last_step=None,
        budget_ms=None,
        layout=ParallelLayout.assumed(request.world_size),
        placements=None,
        experts=(),
        site_names=None,
        is_disabled=True,
    )


def try_prepare(request: Request) -> tuple[Preparation | None, RankfoldError | None]:
    """Prepare a session, or return what this rank has to refuse it for; never raises."""
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


def _prepare(request: Request) -> Preparation:
    # A session that is turned off is due for nothing, not even for scopes that others open.
    schedule = (
        Schedule({}, None)
        if request.is_disabled
        else Schedule.build(
            request.signals,
            request.every,
            request.hist_every,
            request.last_step,
            call_sites=request.call_sites,
            first_step=request.first_step,
            offset=request.due_offset,
        )
    )
    layout = _layout(request)
    layout.require_world_size(request.world_size)
    selection = Selection(request.select, request.exclude)
    rules = PlacementRules(layout, request.placements, request.experts, reduce_partial=request.reduce_partial)
    book, clock = SiteBook(rules, layout, request.rank), SelfTime()
    budget_ms = checked_budget(request.budget_ms)
    budget = None if budget_ms is None else CostBudget(budget_ms)
    observations = Observations(book, request.descriptor, budget)
    stage = layout.coordinates(request.rank)["pp"] if dict(layout.axes).get("pp", 1) > 1 else None
    names = ModelNames(request.chunks, rule=request.site_names, stage=stage)
    kinds = [name for name in schedule.every if name not in SIGNALS and name != ANY_KIND]
    prepared = Preparation(
        schedule=schedule,
        layout=layout,
        selection=selection,
        book=book,
        observations=observations,
        budget=budget,
        activations=ActivationObserver(
            request.chunks,
            names,
            selection,
            Capture(book, observations, clock),
            signals=tuple(schedule.every),
            call_sites=bool(kinds),
        ),
        parameters=ParameterObserver(
            names, selection, book, observations, signals=tuple(schedule.every), full_updates=request.full_updates
        ),
        call_sites=CallSiteObserver(names, book, observations, clock, kinds),
        clock=clock,
        optimizers=_optimizers(request.optimizers),
        backend=_backends(request.chunks),
    )
    if stage is None:
        # With stages, a rank may well have no site of a selection that other ranks have.
        _require_matches(prepared, names)
    claim_model(request.chunks, request.name)
    return prepared


def _backends(chunks: Sequence[nn.Module]) -> str:
    """Return what reduces the tensors of the devices that the model is on."""
    devices = {parameter.device for chunk in chunks for parameter in chunk.parameters()} or {torch.device("cpu")}
    return ", ".join(sorted({backend_name(device) for device in devices}))


def _layout(request: Request) -> ParallelLayout:
    if isinstance(request.layout, ParallelLayout):
        return request.layout
    if request.layout is not None:
        return ParallelLayout.from_mesh(request.layout)
    tensors = [parameter for chunk in request.chunks for parameter in chunk.parameters()]
    return layout_of(tensors, request.world_size) or ParallelLayout.assumed(request.world_size)


def _optimizers(given: Optimizer | Sequence[Optimizer] | None) -> tuple[Optimizer, ...]:
    if given is None:
        return ()
    optimizers = tuple(map(_unwrapped, given if isinstance(given, Sequence) else (given,)))
    for one in optimizers:
        if not hasattr(one, "register_step_pre_hook"):
            raise ConfigurationError(
                f"optimizer is a {type(one).__name__}, which has no step hooks",
                remedy="give torch.optim.Optimizer objects, or leave optimizer out",
            )
    return optimizers


def _unwrapped(optimizer: Any) -> Any:
    """Return the optimizer that really steps; what Accelerate prepares is a shell around it, without hooks."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def _require_matches(prepared: Preparation, names: ModelNames) -> None:
    signals = prepared.schedule.every
    wants_modules = [s for s in ("activations", "activation_grads") if s in signals]
    wants_weights = [s for s in ("parameters", "gradients", "updates") if s in signals]
    counts = (prepared.activations.num_modules, len(prepared.parameters.parameters))
    for wanted, found in zip((wants_modules, wants_weights), counts, strict=True):
        if wanted and not found:
            weights = [name for name, *_ in names.parameters()]
            raise NothingSelectedError(
                f"select {prepared.selection} matches nothing for {', '.join(wanted)}; "
                f"the model has {names.census()}; {len(weights)} parameters"
                + (f" (such as {weights[0]!r})" if weights else ""),
                remedy="choose a pattern that matches these names, or leave the signal out",
            )
