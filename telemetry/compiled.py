"""Hooks and call sites inside of compiled code.

While torch compiles, a hook or a call site cannot run; it is traced. What we trace is an operator without a result that
torch keeps in the graph (``rankfold::…``). When the graph runs, the operator finds our side by a number, which travels
as a tensor: a graph that many equal blocks share then takes it as an input, where a Python number would give every
block a graph of its own. Gradients come from an identity whose backward holds such an operator.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from typing import Any, Final, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from telemetry.scopes import GATE, deliver
from telemetry.torch_internals import compile_obstacle, define_effect, left_out, only_inline

__all__ = ["Receiver", "TracedHook", "UnresolvedOwner", "is_ready", "make_ready", "trace_call_site"]


class Receiver(Protocol):
    """Our side of one hook: what eager code calls directly, and a compiled graph through operators."""

    module: nn.Module

    def take(self, output: Any) -> None:
        """Take what the module returned, or, before the forward, its arguments."""

    def take_tensor(self, path: str, tensor: Tensor, *, awaits_gradient: bool, no_gradient: str) -> None:
        """Take one tensor of the output; it awaits a gradient, unless there is a reason why that cannot be had."""

    def take_gradient(self, path: str, gradient: Tensor) -> None:
        """Take the gradient of one tensor of the output."""


class UnresolvedOwner:
    """Stands for the owner of a call in compiled code that no hook of ours could identify.

    Attributes:
        class_name: of the owner.
    """

    def __init__(self, class_name: str) -> None:
        self.class_name = class_name


_numbers: Final = itertools.count()
_receivers: Final[WeakValueDictionary[int, Receiver]] = WeakValueDictionary()
_NOBODY: Final = torch.tensor(-1)
_obstacle: Final[list[str]] = []


def is_ready() -> bool:
    """Tell whether compiled code can be traced; defines the operators if the compiler is loaded and they are not."""
    return make_ready() == "" if "torch._dynamo" in sys.modules else False


def make_ready() -> str:
    """Define the operators, once, and return why that cannot be, or ""."""
    if _obstacle:
        return _obstacle[0]
    try:
        obstacle = compile_obstacle() or _define()
    except Exception as error:  # whatever a torch that we do not know may do, a session goes on without
        obstacle = f"torch {torch.__version__} refused our operators, {type(error).__name__}: {error}"
    _obstacle.append(obstacle)
    return obstacle


def _define() -> str:
    define_effect("began(Tensor handle) -> ()", _run_began)
    define_effect("output(Tensor x, Tensor handle, str path, bool awaits_gradient, str no_gradient) -> ()", _run_output)
    define_effect("gradient(Tensor x, Tensor handle, str path) -> ()", _run_gradient)
    define_effect(
        "call_site(Tensor x, Tensor handle, str owner_class, str name, str source_kind, "
        "int? tp_shard_dim, int? sequence_dim, int? batch_dim) -> ()",
        _run_call_site,
    )
    only_inline(TracedHook.__call__)
    return ""


# The operators. They run when a graph does, and must not raise into it.


def _run_began(handle: Tensor) -> None:
    if (receiver := _receivers.get(int(handle))) is not None:
        receiver.take(None)


def _run_output(x: Tensor, handle: Tensor, path: str, awaits_gradient: bool, no_gradient: str) -> None:
    if (receiver := _receivers.get(int(handle))) is not None:
        receiver.take_tensor(path, x, awaits_gradient=awaits_gradient, no_gradient=no_gradient)


def _run_gradient(x: Tensor, handle: Tensor, path: str) -> None:
    if (receiver := _receivers.get(int(handle))) is not None:
        receiver.take_gradient(path, x)


def _run_call_site(
    x: Tensor,
    handle: Tensor,
    owner_class: str,
    name: str,
    source_kind: str,
    tp_shard_dim: int | None,
    sequence_dim: int | None,
    batch_dim: int | None,
) -> None:
    receiver = _receivers.get(int(handle))
    owner: object = UnresolvedOwner(owner_class) if receiver is None else receiver.module
    deliver(owner, name, source_kind, x, tp_shard_dim, sequence_dim, batch_dim)


def _inert(*_: Any) -> None:
    return None


def _make_inert() -> Any:
    return _inert


class TracedHook:
    """A forward hook, or forward pre-hook, for eager and for compiled code.

    It neither pickles nor copies: what does is a function without effect. The object stays the same for the life of a
    session, because compiled graphs guard on it.

    Args:
        receiver: our side.
        traces: what it leaves in compiled graphs: ``output`` the tensors that the module returns, ``began`` that it
            was called, anything else nothing. The hook then at most tells call sites whose they are.
        gradients: whether the gradients of outputs are traced as well.
    """

    def __init__(self, receiver: Receiver, *, traces: str, gradients: bool) -> None:
        self._take = left_out(receiver.take)
        self._traces = traces
        self.gradients = gradients
        number = next(_numbers)
        _receivers[number] = receiver
        self.handle = torch.tensor(number)

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> Any:
        """Take the output, or leave a trace of it in the graph that is being compiled."""
        if not is_dynamo_compiling():
            self._take(output)
            return None
        if self._traces == "began":
            torch.ops.rankfold.began(self.handle)
        if self._traces == "output":
            return _traced(output, "", self)
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_inert, ()


def trace_call_site(
    owner: object,
    name: str,
    source_kind: str,
    tensor: Tensor,
    tp_shard_dim: int | None,
    sequence_dim: int | None,
    batch_dim: int | None,
) -> None:
    """Leave a trace of a call in the graph that is being compiled, if somebody listens to its kind."""
    if source_kind not in GATE.traced_kinds:
        return
    handle = _NOBODY
    if isinstance(owner, nn.Module):
        for hook in owner._forward_hooks.values():
            if isinstance(hook, TracedHook):
                handle = hook.handle
    torch.ops.rankfold.call_site(
        tensor, handle, type(owner).__name__, name, source_kind, tp_shard_dim, sequence_dim, batch_dim
    )


class _Identity(torch.autograd.Function):
    """Passes a tensor on, and shows the gradient that comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: Tensor, path: str) -> Tensor:
        """Return a copy, because a view of a custom function must not be changed in place by what comes next."""
        ctx.save_for_backward(handle)
        ctx.path = path
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Show the gradient and return it as it came."""
        (handle,) = ctx.saved_tensors
        torch.ops.rankfold.gradient(gradients[0], handle, ctx.path)
        return gradients[0], None, None


def _traced(output: Any, path: str, hook: TracedHook) -> Any:
    """Trace every tensor in a module's output, and return the output with the identities in the place of its tensors.

    Walks in the order, and with the paths, of ``telemetry.collect.outputs.tensors_in``.
    """
    if isinstance(output, Tensor):
        # Asked while tracing, because inside of the graph no tensor requires a gradient.
        awaits = hook.gradients and output.requires_grad
        torch.ops.rankfold.output(output, hook.handle, path, awaits, "")
        return _Identity.apply(output, hook.handle, path) if awaits else output  # type: ignore[no-untyped-call]
    if type(output) in (tuple, list):
        return type(output)([_traced(value, _joined(path, str(i)), hook) for i, value in enumerate(output)])
    if type(output) is dict:
        return {key: _traced(value, _joined(path, str(key)), hook) for key, value in output.items()}
    _trace_only_values(output, path, hook)
    return output


def _trace_only_values(output: Any, path: str, hook: TracedHook) -> None:
    """Trace the tensors of a container that we cannot rebuild, so that only their gradients are lost."""
    if isinstance(output, Mapping):
        parts = [(str(key), value) for key, value in output.items()]
    elif isinstance(output, tuple) and hasattr(output, "_fields"):
        parts = [(name, getattr(output, name)) for name in output._fields]
    elif isinstance(output, tuple | list):
        parts = [(str(index), value) for index, value in enumerate(output)]
    elif hasattr(output, "__dataclass_fields__"):
        parts = [(name, getattr(output, name)) for name in output.__dataclass_fields__]
    else:
        return
    for name, value in parts:
        if isinstance(value, Tensor):
            reason = f"gradients of tensors in a {type(output).__name__} are not seen in compiled code"
            awaits = hook.gradients and value.requires_grad
            torch.ops.rankfold.output(value, hook.handle, _joined(path, name), awaits, reason)
        else:
            _trace_only_values(value, _joined(path, name), hook)


def _joined(path: str, part: str) -> str:
    return f"{path}.{part}" if path else part
