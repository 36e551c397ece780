"""Outputs of modules, and the gradients that reach them: hooks that exist only while a due step runs.

Between due steps the model carries nothing of ours, so it costs nothing, pickles and copies as it is. A copy that is
made inside of a due step carries an inert function in place of each hook.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from telemetry.collect.book import LocalSite, SiteBook
from telemetry.collect.clock import SelfTime
from telemetry.collect.names import ModelNames
from telemetry.collect.observations import Observations
from telemetry.collect.outputs import tensors_in
from telemetry.collect.select import Selection
from telemetry.presence import Presence

__all__ = ["ActivationObserver", "InertHook", "is_recomputation"]

_NEVER_RAN = "the module did not run in this step"
_NO_GRADIENT = "no gradient reached the output in this step"


def _inert(*_: Any) -> None:
    return None


def _make_inert() -> Callable[..., None]:
    return _inert


class InertHook:
    """A forward hook that neither pickles nor copies: what does is a function without effect."""

    def __init__(self, call: Callable[[Any], None]) -> None:
        self._call = call

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        self._call(output)

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_inert, ()


class ActivationObserver:
    """Observes the outputs of the selected modules, and counts the forward passes of ``root`` as micro-batches."""

    def __init__(
        self,
        root: nn.Module,
        names: ModelNames,
        selection: Selection,
        book: SiteBook,
        observations: Observations,
        clock: SelfTime,
    ) -> None:
        self._root = root
        self._modules = [
            (name, module, aliases) for name, module, aliases in names.modules() if selection.takes_module(name, module)
        ]
        self._book = book
        self._observations = observations
        self._clock = clock
        self._handles: list[RemovableHandle] = []
        self._ran: set[str] = set()
        self.num_forwards = 0

    @property
    def num_modules(self) -> int:
        """Number of selected modules."""
        return len(self._modules)

    def never_ran(self) -> tuple[str, ...]:
        """Return the selected modules that no due step has run so far."""
        return tuple(name for name, _, _ in self._modules if name not in self._ran)

    def install(self, *, activations: bool, gradients: bool) -> None:
        """Add the hooks of a due step; the caller removes them on every way out of it."""
        self.num_forwards = 0
        self._handles.append(self._root.register_forward_pre_hook(InertHook(self._count_forward)))
        if not activations and not gradients:
            return
        if activations:
            for site in self._book.of_kind("activation"):
                self._observations.expect(site, _NEVER_RAN)
        for name, module, aliases in self._modules:
            hook = InertHook(self._observer_of(name, aliases, activations=activations, gradients=gradients))
            self._handles.append(module.register_forward_hook(hook))

    def remove(self) -> None:
        """Take every hook off."""
        while self._handles:
            self._handles.pop().remove()

    def _count_forward(self, _: Any) -> None:
        if not is_recomputation():
            self.num_forwards += 1

    def _observer_of(
        self, name: str, aliases: tuple[str, ...], *, activations: bool, gradients: bool
    ) -> Callable[[Any], None]:
        def observe(output: Any) -> None:
            with self._clock:
                recomputed = is_recomputation()
                self._ran.add(name)
                tensors = list(tensors_in(output))
                for path, tensor in tensors:
                    site_name = f"{name}:{path}" if path else name
                    if activations and not recomputed:
                        self._observations.observe(self._site("activation", site_name, tensor, aliases), tensor)
                    if gradients and tensor.requires_grad:
                        self._await_gradient(self._site("activation_grad", site_name, tensor, aliases), tensor)
                if activations and not tensors:
                    self._mark_without_tensor(name, aliases, output)

        return observe

    def _site(self, kind: str, name: str, tensor: Tensor, aliases: tuple[str, ...]) -> LocalSite:
        return self._book.add(kind, name, tensor, aliases=aliases)

    def _await_gradient(self, site: LocalSite, tensor: Tensor) -> None:
        self._observations.expect(site, _NO_GRADIENT)

        def observe(gradient: Tensor) -> None:
            with self._clock:
                self._observations.observe(site, gradient)

        # The graph owns this hook and frees it with itself. If the step has ended by then it must stay silent.
        self._handles.append(tensor.register_hook(observe))  # type: ignore[no-untyped-call]

    def _mark_without_tensor(self, name: str, aliases: tuple[str, ...], output: Any) -> None:
        site = self._book.add("activation", name, None, aliases=aliases)
        reason = f"the output is {type(output).__name__} and holds no tensor"
        self._observations.mark(site, Presence.UNSUPPORTED, reason)


def is_recomputation() -> bool:
    """Tell whether a backward pass is running this forward again, as activation checkpointing does."""
    return torch._C._current_graph_task_id() != -1
