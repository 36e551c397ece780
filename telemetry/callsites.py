"""Call sites: lines of model code that show a tensor which no module returns.

Signatures and meaning are those of Megatron Core's ``tensor_observation``, so that a call site moves between the two by
a change of its import. A call reaches whoever listens: a session inside of its due steps
(``watch(…, call_sites=("router_logits",))``), or any function inside of :func:`capture_tensor_observations`. Elsewhere
it costs a hundred nanoseconds and does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from telemetry import compiled
from telemetry.scopes import GATE, deliver, explicit_scope, is_open, suspended

__all__ = [
    "capture_tensor_observations",
    "is_observing_tensor",
    "observe_layer_residuals",
    "observe_tensor",
    "suspend_tensor_observations",
]


def observe_tensor(
    owner: object,
    name: str,
    source_kind: str,
    tensor: Tensor,
    *,
    tp_shard_dim: int | None = None,
    sequence_dim: int | None = None,
    batch_dim: int | None = None,
) -> None:
    """Show a tensor of the forward pass; called on every rank that has it, in eager and in compiled code.

    A forward that activation checkpointing runs again is not shown again.

    Args:
        owner: the module that the tensor belongs to; its path in the model becomes the name of the site.
        name: of the tensor within ``owner``.
        source_kind: what sort of tensor it is, any word; scopes choose by it.
        tensor: of any shape, which may change from call to call. It is read at once and not kept.
        tp_shard_dim: dim that is split over the tensor-parallel ranks, None where they all hold the same elements.
        sequence_dim: dim of the sequence, which context-parallel ranks share out; None where there is no such dim.
        batch_dim: dim of the batch, which data-parallel ranks share out; None where there is no such dim.

    Example:
        >>> import torch
        >>> shown = []
        >>> with capture_tensor_observations(lambda *call: shown.append(call[1:3]), {"router_logits"}):
        ...     observe_tensor(None, "logits", "router_logits", torch.ones(2), tp_shard_dim=-1)
        >>> shown
        [('logits', 'router_logits')]
    """
    # First, because it is all that most calls come to.
    if not GATE.kinds:
        return
    if is_dynamo_compiling():
        compiled.trace_call_site(owner, name, source_kind, tensor, tp_shard_dim, sequence_dim, batch_dim)
        return
    deliver(owner, name, source_kind, tensor, tp_shard_dim, sequence_dim, batch_dim)


def capture_tensor_observations(
    observer: Callable[..., None], source_kinds: Iterable[str]
) -> AbstractContextManager[None]:
    """Return a scope in which ``observer`` gets the calls of the given kinds, and nobody else gets any.

    Args:
        observer: called as ``observer(owner, name, source_kind, tensor, tp_shard_dim, sequence_dim, batch_dim)``; one
            that takes five arguments is called without the last two. ``session.observer`` is one.
        source_kinds: kinds to pass on.
    """
    return explicit_scope(observer, source_kinds, traced=compiled.is_ready())


def suspend_tensor_observations() -> AbstractContextManager[None]:
    """Return a scope in which no call reaches anybody, whatever context is restored inside of it."""
    return suspended()


def is_observing_tensor(source_kind: str) -> bool:
    """Tell whether a call of this kind would reach somebody, for call sites whose tensor costs something to make."""
    if is_dynamo_compiling():
        return source_kind in GATE.traced_kinds
    return is_open(source_kind)


def observe_layer_residuals(layer: object, accumulator: Tensor, output: Tensor) -> None:
    """Show the residual stream that enters a layer, and what the layer adds to it.

    The kinds are ``residual_accumulator`` and ``residual_contribution``. The latter is ``output - accumulator``, made
    only if somebody listens, and without autograd.

    Args:
        layer: the owner. Under ``layer.config.sequence_parallel`` dim 0 is split over the tensor-parallel ranks.
        accumulator: ``[sequence, batch, hidden]``, the input of the layer.
        output: the same shape, its output.
    """
    if not GATE.kinds:
        return
    tp_shard_dim = 0 if getattr(getattr(layer, "config", None), "sequence_parallel", False) else None
    for kind in ("residual_accumulator", "residual_contribution"):
        if is_observing_tensor(kind):
            tensor = accumulator if kind == "residual_accumulator" else _contribution(accumulator, output)
            observe_tensor(layer, kind, kind, tensor, tp_shard_dim=tp_shard_dim, sequence_dim=0, batch_dim=1)


def _contribution(accumulator: Tensor, output: Tensor) -> Tensor:
    with torch.no_grad():
        return output.detach() - accumulator.detach()
