"""A loop that cannot be changed: a callable tells the steps apart."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import telemetry
from tests.aggregators import KeepingAggregator


class Trainer:
    """Somebody else's loop, with a counter that goes up after the optimizer's step."""

    def __init__(self, num_micro_batches: int = 1) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.global_step = 0
        self.num_micro_batches = num_micro_batches

    def fit(self, num_steps: int, fail_at: int | None = None) -> None:
        for _ in range(num_steps):
            for _ in range(self.num_micro_batches):
                self.model(torch.ones(3, 2)).sum().backward()
            if self.global_step + 1 == fail_at:
                raise ZeroDivisionError
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.global_step += 1


def watch(trainer: Trainer, kept: KeepingAggregator, **options):
    options = {"every": 2, "step": lambda: trainer.global_step + 1, **options}
    return telemetry.watch(trainer.model, to=kept, optimizer=trainer.optimizer, **options)


def test_the_callable_gives_each_step_its_number_and_all_its_micro_batches():
    trainer, kept = Trainer(num_micro_batches=3), KeepingAggregator()
    with watch(trainer, kept):
        trainer.fit(5)
    assert kept.steps == [1, 2, 4]
    assert {packet.facts.num_micro_batches for packet in kept.packets} == {3}
    assert {packet.facts.provenance for packet in kept.packets} == {"implicit"}
    assert kept.summary("activation", "0", 4).calls == 3
    assert kept.summary("gradient", "0.weight", 4).calls == 1
    assert kept.summary("update", "0.weight", 4).absmax > 0


def test_the_record_is_that_of_an_explicit_loop():
    def record(implicit: bool) -> dict:
        trainer, kept = Trainer(), KeepingAggregator()
        with watch(trainer, kept, every=1, step=(lambda: trainer.global_step + 1) if implicit else None) as session:
            for step in range(1, 4):
                if implicit:
                    trainer.fit(1)
                else:
                    with session.step(step):
                        trainer.fit(1)
        return {(step, *key): kept.summary(*key, step) for step in kept.steps for key in kept.rows(step)}

    assert record(True) == record(False)


def test_a_number_that_goes_back_is_passed_over_and_told():
    trainer, kept = Trainer(), KeepingAggregator()
    with watch(trainer, kept, every=1) as session:
        trainer.fit(2)
        trainer.global_step = 0
        trainer.fit(1)
    assert kept.steps == [1, 2]
    assert session.report.num_passed_over == 1
    assert "step repeated or went back" in str(session.report)


def test_a_callable_that_raises_ends_the_recording_but_not_the_training():
    trainer, kept = Trainer(), KeepingAggregator()

    def broken() -> int:
        if trainer.global_step == 2:
            raise AttributeError("no counter")
        return trainer.global_step + 1

    with watch(trainer, kept, every=1, step=broken) as session:
        trainer.fit(4)
    assert trainer.global_step == 4
    assert "AttributeError: no counter" in str(session.report)


def test_the_step_that_an_exception_breaks_off_is_not_recorded():
    trainer, kept = Trainer(), KeepingAggregator()
    with pytest.raises(ZeroDivisionError), watch(trainer, kept, every=1):
        trainer.fit(4, fail_at=3)
    assert kept.steps == [1, 2]
    assert not trainer.model._forward_pre_hooks
