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


@pytest.mark.parametrize(
    ("compiled", "backend"),
    [
        (compiled_whole, "aot_eager"),
        (compiled_in_place, "aot_eager"),
        (compiled_by_block, "aot_eager"),
        pytest.param(compiled_whole, "inductor", marks=needs_compiler),
    ],
)
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
    assert losses == found
    assert all(torch.equal(a, b) for a, b in zip(weights, found_weights, strict=True))
    assert not counters["graph_break"]
    assert graphs[1:] == [graphs[1]] * 19
    assert graphs[-1] == 2 * graphs_without[-1]
    assert kept.steps == [1, 5, 10, 15, 20]


def observed(model: nn.Module, call: nn.Module, **options) -> KeepingAggregator:
    """Observe two steps of two micro-batches each, the optimizer between them."""
    kept = KeepingAggregator()
    with watch(model, kept, every=1, **options) as session:
        train(model, call, session, steps=2)
    return kept


def rows(kept: KeepingAggregator) -> dict:
    return {
        (kind, name): kept.summary(kind, name, 2).to_dict()
        for kind, name in kept.rows(2)
        if kept.presence(kind, name, 2)[0] is Presence.OBSERVED
    }


@pytest.mark.parametrize("compiled", [compiled_whole, compiled_in_place, compiled_by_block])
def test_compiled_code_shows_what_eager_code_shows(compiled):
    eager = Net()
    model = copy.deepcopy(eager)
    expected = observed(eager, eager)
    found = observed(model, compiled(model, "aot_eager"))
    assert set(rows(found)) == set(rows(expected))
    assert len(rows(found)) == 2 * (2 * 4 + 1)
    for site, summary in rows(expected).items():
        assert rows(found)[site] == pytest.approx(summary, rel=1e-5, abs=1e-7, nan_ok=True), site
        assert rows(found)[site]["calls"] == 2
    assert [packet.facts.num_micro_batches for packet in found.packets] == [2, 2]
    assert found.sites().keys() == expected.sites().keys()


def test_a_wrapper_that_was_made_after_the_attach_is_seen_on_its_first_call_wherever_that_falls():
    model, kept = Net(), KeepingAggregator()
    with watch(model, kept, every=2, first_step=False) as session:
        call = torch.compile(model, fullgraph=True, backend="aot_eager")
        call(torch.ones(1, 4))
        for step in (1, 2, 3, 4):
            with session.step(step):
                call(torch.ones(1, 4)).sum().backward()
    assert kept.steps == [2, 4]
    assert kept.summary("activation", "layers.0.up", 4).total == 8
    assert kept.summary("hidden_state", "layers.1.hidden", 4).total == 8


class PlainBlock(nn.Module):
    """A block without a call site: those make their graphs notice a session by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([PlainBlock()])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


@pytest.mark.parametrize("how", ["wrapper", "in place", "block", "function"])
def test_a_graph_that_is_older_than_the_session_makes_its_modules_unsupported_and_says_how_to_help(how):
    model, kept = Plain(), KeepingAggregator()
    compiled = {"wrapper": compiled_whole, "in place": compiled_in_place, "block": compiled_by_block}
    if how == "function":
        call = torch.compile(lambda x: model(x), backend="aot_eager")
        watched = model
    else:
        call = watched = compiled[how](model, "aot_eager")
    call(torch.ones(1, 4)).sum().backward()
    with watch(watched, kept, every=1) as session:
        with session.step(1):
            call(torch.ones(1, 4)).sum().backward()
        torch.compiler.reset()
        with session.step(2):
            call(torch.ones(1, 4)).sum().backward()
    for kind in ("activation", "activation_grad"):
        presence, reason = kept.presence(kind, "layers.0.up", 1)
        assert presence is Presence.UNSUPPORTED
        assert "torch.compiler.reset()" in reason
        assert kept.summary(kind, "layers.0.up", 2).total == 8


def test_eager_modules_beside_compiled_ones_that_do_not_run_are_not_called_compiled():
    compiled = PlainBlock()
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4), "compiled": compiled})
    compiled.compile(backend="aot_eager")
    compiled(model["used"](torch.ones(1, 4)))
    kept = KeepingAggregator()
    with watch(model, kept, every=1, call_sites=()) as session, session.step(1):
        compiled(model["used"](torch.ones(1, 4)))
    presences = {name: kept.presence(kind, name, 1)[0] for kind, name in kept.rows(1) if kind == "activation"}
    observed, unsupported = Presence.OBSERVED, Presence.UNSUPPORTED
    assert presences == {
        "used": observed,
        "compiled": observed,
        "compiled.up": unsupported,
        "compiled.down": unsupported,
    }


class Outputs(nn.Module):
    def forward(self, x: Tensor):
        return {"pair": (x * 2, [x * 3]), "rest": x * 4}


class Consumer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outputs = Outputs()

    def forward(self, x: Tensor) -> Tensor:
        found = self.outputs(x)
        return found["pair"][0] + found["pair"][1][0] + found["rest"]


def test_nested_outputs_have_the_names_that_they_have_in_eager_code():
    found = []
    for compile_it in (False, True):
        model, kept = Consumer(), KeepingAggregator()
        call = torch.compile(model, fullgraph=True, backend="aot_eager") if compile_it else model
        with watch(model, kept, every=1, call_sites=()) as session, session.step(1):
            call(torch.ones(3, requires_grad=True)).sum().backward()
        found.append(kept.rows(1))
        assert kept.summary("activation_grad", "outputs:pair.1.0", 1).total == 3
    assert found[0] == found[1]


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.block, self.use_reentrant = Block(), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("where", ["checkpoint in a graph", "graph in a checkpoint", "graph in a reentrant checkpoint"])
def test_a_checkpoint_and_a_graph_inside_of_each_other_are_observed_once(where):
    model, kept = Checkpointed(use_reentrant="reentrant" in where), KeepingAggregator()
    call = model
    if where == "checkpoint in a graph":
        call = torch.compile(model, fullgraph=True, backend="aot_eager")
    else:
        model.block.compile(fullgraph=True, backend="aot_eager")
    with watch(model, kept, every=1) as session:
        for step in (1, 2):
            with session.step(step):
                call(torch.randn(2, 4, requires_grad=True)).sum().backward()
    for step in (1, 2):
        for kind, name in (
            ("activation", "block.up"),
            ("activation_grad", "block.up"),
            ("hidden_state", "block.hidden"),
        ):
            assert (kept.summary(kind, name, step).calls, kept.summary(kind, name, step).total) == (1, 16), (kind, step)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_compiled_model_copies_inside_of_a_due_step_and_the_copy_reports_nothing(copier):
    model, kept = Net(), KeepingAggregator()
    call = torch.compile(model, fullgraph=True, backend="aot_eager")
    with watch(model, kept, every=1) as session, session.step(1):
        call(torch.ones(1, 4)).sum().backward()
        copier(model)(torch.ones(1, 4))
    assert kept.summary("activation", "layers.0.up", 1).calls == 1


def test_a_compiled_optimizer_step_has_gradients_and_updates():
    model, kept = Net(), KeepingAggregator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step_of_optimizer = torch.compile(optimizer.step, backend="aot_eager")
    options = {"signals": ("gradients", "updates"), "call_sites": ()}
    with watch(model, kept, optimizer=optimizer, every=2, **options) as session:
        graphs = []
        for step in range(1, 7):
            with session.step(step):
                model(torch.ones(1, 4)).sum().backward()
                step_of_optimizer()
                optimizer.zero_grad()
            graphs.append(num_graphs())
    assert graphs[1:] == [graphs[1]] * 5
    gradient, update = (kept.summary(kind, "layers.1.down.bias", 6) for kind in ("gradient", "update"))
    assert (gradient.mean, update.mean) == (1.0, -0.5)
    assert kept.packets[-1].facts.num_applied == 1


def test_the_guards_on_hooks_are_on_while_a_session_lives_and_restored_after_the_last():
    config = torch._dynamo.config
    assert config.skip_nnmodule_hook_guards
    first, second = watch(Net(), KeepingAggregator()), watch(Net(), KeepingAggregator())
    first.close()
    first.close()
    assert not config.skip_nnmodule_hook_guards
    second.close()
    assert config.skip_nnmodule_hook_guards


def test_where_torch_cannot_serve_compiled_code_the_plan_says_so_and_the_modules_are_unsupported(monkeypatch):
    from telemetry import compiled

    monkeypatch.setattr(compiled, "_obstacle", ["torch 0.0 lacks effects"])
    model, kept = Net(), KeepingAggregator()
    call = torch.compile(model, fullgraph=True, backend="aot_eager")
    with watch(call, kept, every=1) as session:
        assert "compiled code are unsupported: torch 0.0 lacks effects" in str(session.plan)
        with session.step(1):
            call(torch.ones(1, 4)).sum().backward()
    assert kept.presence("activation", "layers.0.up", 1) == (Presence.UNSUPPORTED, "torch 0.0 lacks effects")
