"""What one module returns, and the gradients that come back to it, from eager and from compiled code alike."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from telemetry.collect.book import LocalSite, SiteBook
from telemetry.collect.clock import SelfTime
from telemetry.collect.observations import Observations
from telemetry.collect.outputs import tensors_in
from telemetry.presence import Presence
from telemetry.torch_internals import is_recomputing

__all__ = ["Capture", "ModuleOutput"]

_NO_GRADIENT = "no gradient reached the output in this step"


class Capture:
    """What all modules of a session share: where observations go, and what the running step is due for.

    Attributes:
        activations, gradients: whether the step takes them; both False between due steps.
        step_number: tells the steps apart, for hooks that autograd still holds when theirs is over.
    """

    def __init__(self, book: SiteBook, observations: Observations, clock: SelfTime) -> None:
        self.book = book
        self.observations = observations
        self.clock = clock
        self.activations = self.gradients = False
        self.step_number = 0

    def begin(self, *, activations: bool, gradients: bool) -> None:
        """Start a due step."""
        self.step_number += 1
        self.activations, self.gradients = activations, gradients

    def end(self) -> None:
        """End it; whatever comes later is silent."""
        self.step_number += 1
        self.activations = self.gradients = False


class ModuleOutput:
    """Receives the outputs of one selected module.

    Attributes:
        name, module, aliases: of the module.
        has_run, runs_in_step: whether anything ever came from it in a due step, and in the running one.
    """

    def __init__(self, capture: Capture, name: str, module: nn.Module, aliases: tuple[str, ...]) -> None:
        self.name = name
        self.module = module
        self.aliases = aliases
        self.has_run = self.runs_in_step = False
        self._capture = capture
        self._sites: dict[tuple[str, str], LocalSite] = {}

    def expect(self, reason: str) -> None:
        """Schedule the values that the module has shown before, at the begin of a step."""
        self.runs_in_step = False
        if self._capture.activations:
            for (kind, _), site in self._sites.items():
                if kind == "activation":
                    self._capture.observations.expect(site, reason)

    def take(self, output: Any) -> None:
        """Observe whatever the module returned in eager code."""
        with self._capture.clock:
            self.has_run = self.runs_in_step = True
            tensors = list(tensors_in(output))
            for path, tensor in tensors:
                self._observe(path, tensor)
                if self._capture.gradients and tensor.requires_grad:
                    self._await_gradient(self._expect_gradient(path, tensor), tensor)
            if self._capture.activations and not tensors:
                reason = f"the output is {type(output).__name__} and holds no tensor"
                self.mark("activation", Presence.UNSUPPORTED, reason)

    def take_tensor(self, path: str, tensor: Tensor, *, awaits_gradient: bool, no_gradient: str) -> None:
        """Observe one tensor of what the module returned in compiled code."""
        with self._capture.clock:
            self.has_run = self.runs_in_step = True
            self._observe(path, tensor)
            if self._capture.gradients and awaits_gradient:
                site = self._expect_gradient(path, tensor)
                if no_gradient:
                    self._capture.observations.mark(site, Presence.UNSUPPORTED, no_gradient)

    def take_gradient(self, path: str, gradient: Tensor) -> None:
        """Observe the gradient of such a tensor, which its forward has announced in this step."""
        site = self._sites.get(("activation_grad", path))
        if site is not None and self._capture.gradients:
            with self._capture.clock:
                self._capture.observations.observe(site, gradient)

    def mark(self, kind: str, presence: Presence, reason: str) -> None:
        """Say why the module has no row of a kind that holds numbers."""
        self._capture.observations.mark(self._site(kind, "", None), presence, reason)

    def _site(self, kind: str, path: str, tensor: Tensor | None) -> LocalSite:
        site = self._sites.get((kind, path))
        if site is None:
            name = f"{self.name}:{path}" if path else self.name
            site = self._sites[kind, path] = self._capture.book.add(kind, name, tensor, aliases=self.aliases)
        return site

    def _observe(self, path: str, tensor: Tensor) -> None:
        if self._capture.activations and not is_recomputing():
            self._capture.observations.observe(self._site("activation", path, tensor), tensor)

    def _expect_gradient(self, path: str, tensor: Tensor) -> LocalSite:
        site = self._site("activation_grad", path, tensor)
        self._capture.observations.expect(site, _NO_GRADIENT)
        return site

    def _await_gradient(self, site: LocalSite, tensor: Tensor) -> None:
        capture, step_number = self._capture, self._capture.step_number
        if capture.observations.is_left_out(site):
            return

        def observe(gradient: Tensor) -> None:
            if step_number == capture.step_number:
                with capture.clock:
                    capture.observations.observe(site, gradient)

        # The graph owns this hook and frees it with itself, so the number of calls in a step costs no memory of ours.
        tensor.register_hook(observe)  # type: ignore[no-untyped-call]
