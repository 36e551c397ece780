"""Activations, gradients and call sites inside of compiled code."""

from __future__ import annotations

import copy
import pickle
import shutil

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import telemetry
from telemetry.presence import Presence
from tests.aggregators import KeepingAggregator

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="the default backend of torch.compile builds C++, and there is no C++ compiler here",
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.relu, self.down = nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.relu(self.up(x))
        telemetry.observe_tensor(self, "hidden", "hidden_state", hidden, batch_dim=0)
        return x + self.down(hidden)


class Net(nn.Module):
    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def compiled_whole(model: nn.Module, backend: str) -> nn.Module:
    return torch.compile(model, fullgraph=True, backend=backend)


def compiled_in_place(model: nn.Module, backend: str) -> nn.Module:
    model.compile(fullgraph=True, backend=backend)
    return model


def compiled_by_block(model: nn.Module, backend: str) -> nn.Module:
    for layer in model.layers:
        layer.compile(fullgraph=True, backend=backend)
    return model


def train(model: nn.Module, call: nn.Module, session=None, *, steps: int = 20):
    """Return losses and parameters; twenty steps of two micro-batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    random = torch.Generator().manual_seed(1)
    losses, graphs = [], []
    for step in range(1, steps + 1):
        scope = session.step(step) if session else torch.enable_grad()
        with scope:
            for _ in range(2):
                loss = call(torch.randn(5, 4, generator=random)).square().mean()
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        graphs.append(num_graphs())
    return losses, [p.detach().clone() for p in model.parameters()], graphs


def watch(model: nn.Module, kept: KeepingAggregator, **options):
    given = {"signals": ("activations", "activation_grads"), "call_sites": ("hidden_state",), "every": 5, **options}
    return telemetry.watch(model, to=kept, **given)


@pytest.mark.parametrize("compiled", [compiled_whole, compiled_in_place, compiled_by_block])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_compiler)])
def test_a_model_compiled_whole_is_seen_with_two_graphs_and_trains_bit_for_bit_as_without_us(compiled, backend):
    original = Net()
    plain = copy.deepcopy(original)
    losses, weights, graphs_without = train(plain, compiled(plain, backend))
    torch._dynamo.reset()
    counters.clear()

    kept = KeepingAggregator()
    call = compiled(original, backend)
    with watch(original, kept) as session:
        found, found_weights, graphs = train(original, call, session)
    eager = KeepingAggregator()
    model = Net()
    model.load_state_dict({name: p for name, p in zip(dict(model.named_parameters()), weights, strict=True)})
    assert losses == found
    assert all(torch.equal(a, b) for a, b in zip(weights, found_weights, strict=True))
    assert not counters["graph_break"]
    assert graphs[1:] == [graphs[1]] * 19
    assert graphs[-1] == 2 * graphs_without[-1]
    assert kept.steps == [1, 5, 10, 15, 20]
    del eager
