"""Parameters, their gradients, and what an optimizer step really changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from telemetry.block import Block
from telemetry.collect.book import SiteBook
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
        self.parameters = [
            ObservedParameter(name, tensor, aliases)
            for name, tensor, aliases, owner in names.parameters()
            if not isinstance(tensor, nn.parameter.UninitializedParameter) and selection.takes_parameter(name, owner)
        ]
        for kind in ("parameter", "gradient", "update"):
            if f"{kind}s" in signals:
                for parameter in self.parameters:
                    self._define(kind, parameter, full_updates=full_updates)

    def _define(self, kind: str, parameter: ObservedParameter, *, full_updates: bool) -> None:
        sample_size = UPDATE_SAMPLE_SIZE if kind == "update" and not full_updates else None
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
        for parameter in self.parameters:
            why = reason if parameter.tensor.requires_grad or kind == "parameter" else "requires_grad is False"
            self._observations.expect(self._book.of(kind, parameter.name), why)

    def observe_values(self) -> None:
        """Reduce the parameters as they are now."""
        for parameter in self.parameters:
            self._observations.observe(self._book.of("parameter", parameter.name), parameter.tensor)

    def observe_gradients(self, among: frozenset[int] | None = None, *, only_missing: bool = False) -> None:
        """Reduce the gradients as they are now.

        Args:
            among: ids of the parameters to look at, None for all.
            only_missing: pass over gradients that the step has already observed.
        """
        for parameter in self.parameters:
            if among is not None and id(parameter.tensor) not in among:
                continue
            site = self._book.of("gradient", parameter.name)
            if only_missing and self._observations.is_observed(site):
                continue
            gradient = parameter.tensor.grad
            if gradient is None:
                # Where Megatron accumulates gradients in a buffer of its own.
                gradient = getattr(parameter.tensor, "main_grad", None)
            if gradient is None:
                continue
            if is_dtensor(gradient) and gradient.placements != parameter.tensor.placements:  # type: ignore[attr-defined]
                reason = f"the gradient is placed as {gradient.placements}, not as its parameter"  # type: ignore[attr-defined]
                self._observations.mark(site, Presence.UNSUPPORTED, reason)
            else:
                self._observations.observe(site, gradient)

    def snapshot(self, among: frozenset[int] | None = None) -> None:
        """Keep the followed elements as they are before the step, unless they are kept already."""
        with torch.no_grad():
            for parameter in self.parameters:
                wanted = among is None or id(parameter.tensor) in among
                if not wanted or parameter.before is not None or not parameter.tensor.requires_grad:
                    continue
                if why := unreadable(parameter.tensor):
                    self._observations.mark(self._book.of("update", parameter.name), Presence.UNSUPPORTED, why)
                else:
                    parameter.before = _followed(parameter)

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

    def forget_snapshots(self) -> None:
        """Drop what a step that raised has left."""
        for parameter in self.parameters:
            parameter.before = None


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
