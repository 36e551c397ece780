"""Each way to write a training loop trains the same bits with and without us, and one logged step more or less."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import telemetry
from telemetry.presence import Presence
from tests.aggregators import KeepingAggregator

STEPS = 7


class Net(nn.Module):
    """Batch norm buffers, dropout's random numbers, a tied weight, a module that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.twice = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens))
        return self.head(self.dropout(torch.relu(self.twice(torch.relu(self.twice(x))))))


class Loop:
    """A training loop with its state; the ways below override parts of it."""

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.model = Net()
        self.optimizers = self.make_optimizers()
        self.scaler: Any = None
        self.losses: list[float] = []

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(self.model.parameters(), lr=1e-2, **self.options)]

    def loss(self) -> Tensor:
        tokens = torch.randint(16, (12,))
        return nn.functional.cross_entropy(self.model(tokens).float(), tokens)

    def step(self, number: int, scope: Any) -> None:
        loss = self.loss()
        loss.backward()
        self.apply(scope)
        self.losses.append(loss.item())

    def apply(self, scope: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for i, optimizer in enumerate(self.optimizers):
            leaves, _ = tree_flatten(optimizer.state_dict()["state"])
            numbers = [leaf for leaf in leaves if leaf is not None]
            tensors |= {f"optimizer{i}.{j}": torch.as_tensor(number) for j, number in enumerate(numbers)}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                tensors[f"gradient.{name}"] = parameter.grad
        scale = None if self.scaler is None else self.scaler.state_dict()
        return {"tensors": tensors, "losses": self.losses, "random": torch.get_rng_state(), "scale": scale}


class Foreach(Loop):
    options: ClassVar = {"foreach": True}


class Fused(Loop):
    options: ClassVar = {"fused": True}


class Autocast(Loop):
    def loss(self) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().loss()


class HalfParameters(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.model.to(torch.bfloat16)
        self.optimizers = self.make_optimizers()


class Scaled(Loop):
    """Float16 autocast with a scaler; an overflow is forced in one step, which is skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)

    def step(self, number: int, scope: Any) -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = self.loss() * (float("inf") if number == 4 else 1.0)
        self.scaler.scale(loss).backward()
        self.apply(scope)
        self.losses.append(loss.nan_to_num(posinf=-1.0).item())

    def apply(self, scope: Any) -> None:
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
            optimizer.zero_grad()
        self.scaler.update()


class ScaledAndClipped(Scaled):
    def apply(self, scope: Any) -> None:
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        if scope is not None:
            scope.before_clipping()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        super().apply(scope)


class Clipped(Loop):
    def apply(self, scope: Any) -> None:
        if scope is not None:
            scope.before_clipping()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        super().apply(scope)


class Accumulated(Loop):
    def step(self, number: int, scope: Any) -> None:
        for _ in range(3):
            loss = self.loss() / 3
            loss.backward()
            self.losses.append(loss.item())
        self.apply(scope)


class SeveralOptimizers(Loop):
    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD(self.model.twice.parameters(), lr=0.1, momentum=0.9),
            torch.optim.AdamW([*self.model.embed.parameters(), *self.model.norm.parameters()], lr=1e-2, amsgrad=True),
        ]


class Closure(Loop):
    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.LBFGS(self.model.parameters(), lr=0.1, max_iter=3)]

    def step(self, number: int, scope: Any) -> None:
        tokens = torch.randint(16, (12,))

        def closure() -> Tensor:
            self.optimizers[0].zero_grad()
            loss = nn.functional.cross_entropy(self.model(tokens), tokens)
            loss.backward()
            self.losses.append(loss.item())
            return loss

        self.optimizers[0].step(closure)


class Scheduled(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizers[0], 0.1, total_steps=STEPS + 1)

    def apply(self, scope: Any) -> None:
        super().apply(scope)
        self.schedule.step()


class Unfrozen(Loop):
    """A layer is frozen at first; later it is set free, and a parameter group is added."""

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        self.model.twice.requires_grad_(False)
        rest = [p for p in self.model.parameters() if p.requires_grad]
        return [torch.optim.AdamW(rest, lr=1e-2)]

    def step(self, number: int, scope: Any) -> None:
        if number == 4:
            self.model.twice.requires_grad_(True)
            self.optimizers[0].add_param_group({"params": list(self.model.twice.parameters())})
        super().step(number, scope)


class TrainAndEval(Loop):
    def step(self, number: int, scope: Any) -> None:
        super().step(number, scope)
        self.model.eval()
        with torch.no_grad():
            self.losses.append(self.loss().item())
        self.model.train()


WAYS = [
    Loop, Foreach, Fused, Autocast, HalfParameters, Scaled, ScaledAndClipped, Clipped, Accumulated, SeveralOptimizers,
    Closure, Scheduled, Unfrozen, TrainAndEval,
]  # fmt: skip


def train(way: type[Loop], options: dict[str, Any] | None) -> tuple[dict[str, Any], KeepingAggregator]:
    loop, kept = way(), KeepingAggregator()
    session = None
    if options is not None:
        session = telemetry.watch(loop.model, to=kept, optimizer=loop.optimizers, **options)
    for number in range(1, STEPS + 1):
        with session.step(number, scaler=loop.scaler) if session else nullcontext() as scope:
            loop.step(number, scope)
    if session:
        session.close()
    return loop.state(), kept


@pytest.mark.parametrize("way", WAYS)
def test_every_bit_of_the_training_is_the_same(way):
    plain, _ = train(way, None)
    for options in ({"every": 1, "hist_every": 1, "full_updates": True}, {"every": 3}):
        observed, kept = train(way, options)
        assert len(kept.packets) == (STEPS if options["every"] == 1 else 3)
        assert [packet.facts.num_micro_batches for packet in kept.packets][-1] >= 1
        assert plain["losses"] == observed["losses"]
        assert plain["scale"] == observed["scale"]
        assert torch.equal(plain["random"], observed["random"])
        assert plain["tensors"].keys() == observed["tensors"].keys()
        different = [
            name
            for name, tensor in plain["tensors"].items()
            if not torch.equal(
                tensor.reshape(-1).view(torch.uint8), observed["tensors"][name].reshape(-1).view(torch.uint8)
            )
        ]
        assert different == []


def test_the_forced_overflow_was_skipped_and_the_scale_grew_and_fell():
    state, kept = train(Scaled, {"every": 1})
    assert [packet.step for packet in kept.packets if packet.facts.num_skipped] == [4]
    assert [packet.facts.grad_scale for packet in kept.packets] == [
        2.0**10,
        2.0**10,
        2.0**11,
        2.0**11,
        2.0**10,
        2.0**10,
        2.0**11,
    ]
    assert state["scale"]["scale"] == 2.0**11


def test_a_layer_that_is_set_free_and_given_to_the_optimizer_has_updates_from_then_on():
    _, kept = train(Unfrozen, {"every": 1})
    found = [kept.presence("update", "twice.weight", step)[0] for step in kept.steps]
    assert found == [Presence.SITE_ABSENT] * 3 + [Presence.OBSERVED] * 4
    assert kept.summary("update", "twice.weight", 4).absmax > 0
    assert kept.summary("gradient", "twice.weight", 4).absmax > 0


def test_rows_of_a_module_that_runs_twice_count_its_calls():
    _, kept = train(Loop, {"every": 1})
    assert kept.summary("activation", "twice", 2).calls == kept.summary("activation_grad", "twice", 2).calls == 2
