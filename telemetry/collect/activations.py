"""The hooks of a session: on the model only while a due step runs, and the same ones in every due step.

Between due steps the model carries nothing of ours, so it costs nothing, pickles and copies as it is. A copy that is
made inside of a due step carries an inert function in place of each hook. Compiled code guards on the hooks: it has one
graph with them and one without. So that these stay the only two, all hooks come and go together, and what of them a
step is due for is decided when they run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from telemetry.collect.module_output import Capture, ModuleOutput
from telemetry.collect.names import ModelNames
from telemetry.collect.select import Selection
from telemetry.compiled import Receiver, TracedHook, make_ready
from telemetry.presence import Presence
from telemetry.torch_internals import (
    HookGuards,
    add_hook,
    compiled_regions,
    ddp_obstacle,
    has_compiled,
    is_recomputing,
    new_hook_key,
    remove_hook,
)

__all__ = ["ActivationObserver"]

_NEVER_RAN = "the module did not run in this step"
_OLD_GRAPH = (
    "nothing came from the compiled code that holds the module: its graph was made before the session was attached; "
    "attach before the first call, or call torch.compiler.reset() after watch(…)"
)


class ActivationObserver:
    """Observes the outputs of the selected modules, and counts the forward passes of the model as micro-batches.

    Args:
        chunks: the model as the loop calls it; a call of the first chunk is a micro-batch.
        signals: of the session. What is not among them is not traced into compiled graphs.
        call_sites: whether calls in compiled code may have to find out which module they belong to.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        names: ModelNames,
        selection: Selection,
        capture: Capture,
        *,
        signals: Sequence[str],
        call_sites: bool,
    ) -> None:
        self._chunks = chunks
        self._capture = capture
        self._key = new_hook_key()
        self._wants_outputs = bool({"activations", "activation_grads"} & set(signals))
        self._wants_gradients = "activation_grads" in signals
        self._outputs = [
            ModuleOutput(capture, name, module, aliases)
            for name, module, aliases in names.modules()
            if selection.takes_module(name, module)
        ]
        self._forwards = _Forwards(chunks[0])
        self._owners = [_Owner(module) for _, module, _ in names.owners()] if call_sites else []
        self._hooks: list[tuple[nn.Module, TracedHook, bool]] = []
        self._is_attached = False
        self.compile_obstacle = ""

    @property
    def num_modules(self) -> int:
        """Number of selected modules."""
        return len(self._outputs)

    @property
    def num_forwards(self) -> int:
        """Forward passes of the model in the running step, or in the last one that was due."""
        return self._forwards.count

    def never_ran(self) -> tuple[str, ...]:
        """Return the selected modules that no due step has run so far."""
        return tuple(output.name for output in self._outputs if not output.has_run)

    def attach(self) -> None:
        """Make the hooks, and let compiled code look out for them; nothing of the model is touched yet."""
        self._is_attached = True
        self.compile_obstacle = make_ready() or ddp_obstacle(self._chunks)
        if not self.compile_obstacle:
            HookGuards.acquire()
        self._hooks.append((self._forwards.module, self._hook(self._forwards, "began"), True))
        outputs = self._outputs if self._wants_outputs else []
        self._hooks += [(output.module, self._hook(output, "output"), False) for output in outputs]
        taken = {id(output.module) for output in outputs}
        owners = [owner for owner in self._owners if id(owner.module) not in taken]
        self._hooks += [(owner.module, self._hook(owner, "owner"), False) for owner in owners]

    def _hook(self, receiver: Receiver, traces: str) -> TracedHook:
        return TracedHook(receiver, traces="" if self.compile_obstacle else traces, gradients=self._wants_gradients)

    def detach(self) -> None:
        """Take everything back, for good."""
        self.remove()
        if self._is_attached and not self.compile_obstacle:
            HookGuards.release()
        self._is_attached = False

    def install(self, *, activations: bool, gradients: bool) -> None:
        """Begin a due step: add the hooks; the caller removes them on every way out of it."""
        self._forwards.count = 0
        self._capture.begin(activations=activations, gradients=gradients)
        for output in self._outputs:
            output.expect(_NEVER_RAN)
        for module, hook, before in self._hooks:
            add_hook(module, self._key, hook, before=before)

    def remove(self) -> None:
        """Take every hook off."""
        self._capture.end()
        for module, _, before in self._hooks:
            remove_hook(module, self._key, before=before)

    def mark_old_graphs(self) -> None:
        """Give modules in compiled code that has never heard of us a row that says so; called before removal."""
        wanted = (("activation", self._capture.activations), ("activation_grad", self._capture.gradients))
        kinds = [kind for kind, is_due in wanted if is_due]
        for output in self._unheard() if kinds else ():
            for kind in kinds:
                output.mark(kind, Presence.UNSUPPORTED, self.compile_obstacle or _OLD_GRAPH)

    def _unheard(self) -> list[ModuleOutput]:
        silent = [output for output in self._outputs if not output.has_run]
        if not silent:
            return []
        heard = {id(output.module) for output in self._outputs if output.runs_in_step}
        if not heard and self.num_forwards == 0 and has_compiled():
            # Whoever compiled a function that calls the model left no mark on the model.
            return silent
        old: set[int] = set()
        for region in (region for chunk in self._chunks for region in compiled_regions(chunk)):
            inside = {id(module) for module in region.inside}
            if not inside & heard:
                old |= inside | ({id(region.root)} - heard)
        return [output for output in silent if id(output.module) in old]


class _Silent:
    """What of a receiver these two have no use for."""

    def take_tensor(self, path: str, tensor: Tensor, *, awaits_gradient: bool, no_gradient: str) -> None:
        """Never called."""

    def take_gradient(self, path: str, gradient: Tensor) -> None:
        """Never called."""


class _Forwards(_Silent):
    """Counts the forward passes of the model."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.count = 0

    def take(self, output: Any) -> None:
        if not is_recomputing():
            self.count += 1


class _Owner(_Silent):
    """Tells call sites in compiled code which module they belong to."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def take(self, output: Any) -> None:
        return None
