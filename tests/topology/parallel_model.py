"""A model that is really split over tensor, context, data and pipeline axes, and whole where every axis has size one.

Written with plain collectives, so that the record is tested against parallelism that knows nothing of it. A layer is
norm → up → GELU → down with a residual; between the layers the sequence is split over ``tp`` (sequence parallelism),
inside of the MLP the width is. All losses are sums, so that the gradients of the parts add up to those of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from telemetry import ParallelLayout

WIDTH, HIDDEN, VOCABULARY = 6, 12, 11
NUM_STAGES, LAYERS_A_STAGE = 2, 2


@dataclass
class Axes:
    """This rank's coordinate on each axis, and the process group along it (None for an axis of size one)."""

    sizes: dict[str, int]
    at: dict[str, int]
    groups: dict[str, dist.ProcessGroup | None] = field(default_factory=dict)
    peers: dict[str, list[int]] = field(default_factory=dict)

    @staticmethod
    def make(sizes: dict[str, int], rank: int) -> Axes:
        """Make the groups of all axes; every rank calls this."""
        layout = ParallelLayout.from_sizes(sizes)
        axes = Axes(sizes, dict(layout.coordinates(rank)))
        for axis, size in sizes.items():
            axes.groups[axis], axes.peers[axis] = None, [rank]
            lines: dict[tuple[int, ...], list[int]] = {}
            for other in range(layout.world_size):
                at = layout.coordinates(other)
                lines.setdefault(tuple(at[a] for a in sizes if a != axis), []).append(other)
            for members in lines.values() if size > 1 else ():
                group = dist.new_group(members)
                if rank in members:
                    axes.groups[axis], axes.peers[axis] = group, members
        return axes

    def sum_(self, axis: str, tensor: Tensor) -> Tensor:
        """Add a tensor up over an axis, in place."""
        if self.groups.get(axis) is not None:
            dist.all_reduce(tensor, group=self.groups[axis])
        return tensor

    def part(self, axis: str, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's part of a tensor that is split over an axis."""
        return tensor.chunk(self.sizes.get(axis, 1), dim)[self.at.get(axis, 0)]

    def whole(self, axis: str, part: Tensor, dim: int) -> Tensor:
        """Gather the parts of an axis."""
        if self.groups.get(axis) is None:
            return part
        parts = [torch.empty_like(part) for _ in range(self.sizes[axis])]
        dist.all_gather(parts, part.contiguous(), group=self.groups[axis])
        return torch.cat(parts, dim)


class Gather(torch.autograd.Function):
    """Sequence parts to the whole sequence; backward adds up and splits."""

    @staticmethod
    def forward(ctx, part: Tensor, axes: Axes) -> Tensor:
        ctx.axes = axes
        return axes.whole("tp", part, 0)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.axes.part("tp", ctx.axes.sum_("tp", gradient.clone()), 0).contiguous(), None


class ReduceScatter(torch.autograd.Function):
    """Partial sums to sequence parts of the sum; backward gathers."""

    @staticmethod
    def forward(ctx, partial: Tensor, axes: Axes) -> Tensor:
        ctx.axes = axes
        return axes.part("tp", axes.sum_("tp", partial.clone()), 0).contiguous()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.axes.whole("tp", gradient, 0), None


class Layer(nn.Module):
    def __init__(self, axes: Axes) -> None:
        super().__init__()
        self.axes = axes
        self.norm = nn.LayerNorm(WIDTH)
        self.gathered = nn.Identity()
        up, down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)
        # Not initialised, because that would draw other random numbers for every size of tp.
        part = HIDDEN // axes.sizes.get("tp", 1)
        self.up = nn.utils.skip_init(nn.Linear, WIDTH, part)
        self.down = nn.utils.skip_init(nn.Linear, part, WIDTH, bias=False)
        with torch.no_grad():
            self.up.weight.copy_(axes.part("tp", up.weight, 0))
            self.up.bias.copy_(axes.part("tp", up.bias, 0))
            self.down.weight.copy_(axes.part("tp", down.weight, 1))
        for parameter, dim in ((self.up.weight, 0), (self.up.bias, 0), (self.down.weight, 1)):
            parameter.tensor_model_parallel, parameter.partition_dim = True, dim

    def forward(self, x: Tensor) -> Tensor:
        wide = self.up(self.gathered(Gather.apply(self.norm(x), self.axes)))
        return x + ReduceScatter.apply(self.down(nn.functional.gelu(wide)), self.axes)


class Stage(nn.Module):
    """One pipeline stage; the first embeds tokens, the last has the head that is tied to the embedding."""

    def __init__(self, axes: Axes, stage: int, num_stages: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [Layer(axes).double() for _ in range(NUM_STAGES * LAYERS_A_STAGE)]
        embedding = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64)
        per_stage = len(layers) // num_stages
        self.layers = nn.ModuleList(layers[stage * per_stage : (stage + 1) * per_stage])
        self.embed = nn.Embedding(VOCABULARY, WIDTH, _weight=embedding) if stage == 0 else None
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if stage == num_stages - 1 else None
        if self.head is not None:
            tied = self.embed.weight if self.embed is not None else nn.Parameter(embedding.clone())
            self.head.weight = tied

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) if self.head is not None else x


def global_name(stage: int):
    """Return the rule that numbers a stage's layers model-wide and gives the tied head the name of the embedding."""

    def rule(name: str) -> str:
        parts = name.split(".")
        if parts[0] == "layers" and len(parts) > 1:
            parts[1] = str(int(parts[1]) + stage * LAYERS_A_STAGE)
        return "embed.weight" if name == "head.weight" else ".".join(parts)

    return rule


def forward_backward(model: Stage, axes: Axes, tokens: Tensor) -> None:
    """Run one micro-batch forward and backward over the pipeline.

    Args:
        tokens: int64 ``[sequence]``; split here over cp, then tp.
    """
    mine = axes.part("tp", axes.part("cp", tokens, 0), 0)
    last = axes.sizes.get("pp", 1) - 1
    stage, peers = axes.at.get("pp", 0), axes.peers.get("pp", [0])
    received = None
    if stage > 0:
        received = torch.empty(len(mine), WIDTH, dtype=torch.float64)
        dist.recv(received, peers[stage - 1])
        received.requires_grad_()
    output = model(mine if received is None else received)
    if stage < last:
        dist.send(output.detach(), peers[stage + 1])
        gradient = torch.empty_like(output)
        dist.recv(gradient, peers[stage + 1])
        output.backward(gradient)
    else:
        (output.square().sum() / 100).backward()
    if received is not None:
        dist.send(received.grad, peers[stage - 1])


def reduce_gradients(model: Stage, axes: Axes) -> None:
    """Make every parameter's gradient that of the whole batch, on all ranks that hold the parameter."""
    for name, parameter in model.named_parameters():
        for axis in ("cp", "dp"):
            axes.sum_(axis, parameter.grad)
        if not getattr(parameter, "tensor_model_parallel", False):
            axes.sum_("tp", parameter.grad)
        if name in ("embed.weight", "head.weight"):
            axes.sum_("pp", parameter.grad)
