"""Parameters, their gradients, and what an optimizer step really changed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from telemetry.block import Block
from telemetry.collect.book import LocalSite, SiteBook
from telemetry.collect.names import ModelNames
from telemetry.collect.observations import Observations, unreadable
from telemetry.collect.select import Selection
from telemetry.dtensor import is_dtensor, local_tensor
from telemetry.presence import Presence

__all__ = ["UPDATE_SAMPLE_SIZE", "ObservedParameter", "ParameterObserver"]

UPDATE_SAMPLE_SIZE: Final = 4096


@dataclass(eq=False)
class ObservedParameter:
    """A selected parameter, and the elements of it whose updates are followed.

    Attributes:
        name, aliases: canonical name, and other names of the same tensor.
        tensor: the parameter.
        sample: int64 row-major local positions of the followed elements on the parameter's device, None for all.
        before: their values before the optimizer step, None outside of a due step.
    """

    name: str
    tensor: nn.Parameter
    aliases: tuple[str, ...]
    sample: Tensor | None = None
    before: Tensor | None = None


class ParameterObserver:
    """Reads parameters at the boundary of an optimizer step. All sites are known at attach."""

    def __init__(
        self,
        names: ModelNames,
        selection: Selection,
        book: SiteBook,
        observations: Observations,
        *,
        signals: Iterable[str],
        full_updates: bool,
    ) -> None:
        self._book = book
        self._observations = observations
        self._kinds = tuple(kind for kind in ("parameter", "gradient", "update") if f"{kind}s" in signals)
        self._full_updates = full_updates
        self.parameters: list[ObservedParameter] = []
        self._lazy = [
            ObservedParameter(name, tensor, aliases)
            for name, tensor, aliases, owner in names.parameters()
            if selection.takes_parameter(name, owner)
        ]
        self._take_in_materialised()

    def _take_in_materialised(self) -> None:
        """Define the sites of parameters that have a shape by now; lazy modules get theirs with the first forward."""
        still_lazy = []
        for parameter in self._lazy:
            if isinstance(parameter.tensor, nn.parameter.UninitializedParameter):
                still_lazy.append(parameter)
                continue
            self.parameters.append(parameter)
            for kind in self._kinds:
                self._define(kind, parameter)
        self._lazy = still_lazy

    def _define(self, kind: str, parameter: ObservedParameter) -> None:
        sample_size = UPDATE_SAMPLE_SIZE if kind == "update" and not self._full_updates else None
        site, block = self._book.define_weight(
            kind, parameter.name, parameter.tensor, aliases=parameter.aliases, sample_size=sample_size
        )
        if site.spec.estimated:
            parameter.sample = _sample_positions(parameter, block)

    def cost(self, kind: str) -> tuple[int, int]:
        """Return the elements and bytes that a logged step reads here for a kind."""
        sizes = [
            (p.sample.numel() if kind == "update" and p.sample is not None else local_tensor(p.tensor).numel(), p)
            for p in self.parameters
        ]
        return sum(n for n, _ in sizes), sum(n * p.tensor.element_size() for n, p in sizes)

    def expect(self, kind: str, reason: str) -> None:
        """Schedule every parameter's site of a kind for the step."""
        self._take_in_materialised()
        for parameter in self.parameters:
            why = reason if parameter.tensor.requires_grad or kind == "parameter" else "requires_grad is False"
            self._observations.expect(self._book.of(kind, parameter.name), why)

    def observe_values(self) -> None:
        """Reduce the parameters as they are now."""
        for parameter in self.parameters:
            self._observations.observe(self._book.of("parameter", parameter.name), parameter.tensor)

    def observe_gradients(
        self, among: frozenset[int] | None = None, *, only_missing: bool = False, divisor: float = 1.0
    ) -> None:
        """Reduce the gradients as they are now.

        Args:
            among: ids of the parameters to look at, None for all.
            only_missing: pass over gradients that the step has already observed.
            divisor: a power of two that the gradients are still scaled by.
        """
        for parameter in self.parameters:
            if among is not None and id(parameter.tensor) not in among:
                continue
            site = self._book.of("gradient", parameter.name)
            gradient = parameter.tensor.grad
            if gradient is None:
                # Where Megatron accumulates gradients in a buffer of its own.
                gradient = getattr(parameter.tensor, "main_grad", None)
            if gradient is None or (only_missing and self._observations.is_observed(site)):
                continue
            gradient = gradient if divisor == 1.0 else _divided(gradient, divisor)
            if gradient.is_sparse:
                self._observe_stored(parameter, gradient)
            if is_dtensor(gradient) and gradient.placements != parameter.tensor.placements:  # type: ignore[attr-defined]
                reason = f"the gradient is placed as {gradient.placements}, not as its parameter"  # type: ignore[attr-defined]
                self._observations.mark(site, Presence.UNSUPPORTED, reason)
            else:
                self._observations.observe(site, gradient)

    def observe_gradients_before_clipping(self) -> None:
        """Reduce the gradients as they are now into sites of the kind ``gradient_pre_clip``."""
        for parameter in self.parameters:
            site = self._companion("gradient_pre_clip", parameter)
            self._observations.expect(site, "the gradient is None")
            if parameter.tensor.grad is not None:
                self._observations.observe(site, parameter.tensor.grad)

    def _observe_stored(self, parameter: ObservedParameter, gradient: Tensor) -> None:
        stored = gradient.detach().coalesce().values()
        self._observations.observe(self._companion("gradient_stored", parameter), stored)

    def _companion(self, kind: str, parameter: ObservedParameter) -> LocalSite:
        known = self._book.find(kind, parameter.name)
        if known is None:
            known, _ = self._book.define_weight(kind, parameter.name, parameter.tensor, aliases=parameter.aliases)
        return known

    def snapshot(self, among: frozenset[int] | None = None) -> None:
        """Keep the followed elements as they are before the step, unless they are kept already."""
        with torch.no_grad():
            for parameter in self.parameters:
                wanted = among is None or id(parameter.tensor) in among
                if not wanted or parameter.before is not None or not parameter.tensor.requires_grad:
                    continue
                site = self._book.of("update", parameter.name)
                if self._observations.is_left_out(site):
                    continue
                if why := unreadable(parameter.tensor):
                    self._observations.mark(site, Presence.UNSUPPORTED, why)
                    continue
                started = time.perf_counter()
                parameter.before = _followed(parameter)
                self._observations.charge(site, time.perf_counter() - started)

    def observe_updates(self) -> None:
        """Reduce after minus before for every parameter that has a snapshot, and drop the snapshots."""
        for parameter in self.parameters:
            before, parameter.before = parameter.before, None
            if before is None:
                continue
            site = self._book.of("update", parameter.name)
            if before.shape != (after := _followed(parameter)).shape or before.device != after.device:
                self._observations.mark(site, Presence.UNSUPPORTED, "the parameter was replaced during the step")
                continue
            with torch.no_grad():
                # Half types widen first: the difference of two bfloat16 values need not be a bfloat16.
                self._observations.observe(site, after.to(torch.float64) - before.to(torch.float64))

    def forget_snapshots(self, reason: str = "") -> None:
        """Drop the snapshots of a step that raised, or that the scaler skipped for ``reason``."""
        for parameter in self.parameters:
            parameter.before = None
            if reason and parameter.tensor.requires_grad:
                self._observations.mark(self._book.of("update", parameter.name), Presence.SITE_ABSENT, reason)


def _divided(gradient: Tensor, divisor: float) -> Tensor:
    """Return a scratch copy, in float32 or wider, in which the division by a power of two is exact."""
    with torch.no_grad():
        return gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32)) * (1.0 / divisor)


def _followed(parameter: ObservedParameter) -> Tensor:
    flat = local_tensor(parameter.tensor).reshape(-1)
    return flat.clone() if parameter.sample is None else flat[parameter.sample]


def _sample_positions(parameter: ObservedParameter, block: Block) -> Tensor:
    """Choose followed elements of the logical tensor by its name alone: the same in every run and for every sharding.

    Returns the local positions of those that lie here.
    """
    seed = int.from_bytes(hashlib.blake2b(parameter.name.encode(), digest_size=8).digest(), "little")
    chosen = np.random.default_rng(seed).choice(block.numel, UPDATE_SAMPLE_SIZE, replace=False)
    return torch.from_numpy(block.local_positions(np.sort(chosen))).to(parameter.tensor.device)
