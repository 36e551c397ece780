"""The real Trainer on CPUs: its steps, its axis, its interval, one process and two."""

import importlib
import os
import sys

import pytest
import torch
import torch.distributed as dist

from aggregator import open_history
from aggregator.sinks import MemorySink
from telemetry.errors import ConfigurationError, IntegrationUnavailableError, RunDirectoryInUseError
from tests.integrations.frames import (
    ACCUMULATION,
    BATCH,
    INTERVAL,
    MAX_STEPS,
    WIDTH,
    Net,
    assert_gradients_are,
    gradient_norm,
    inputs_and_targets,
    launched,
    record,
)
from tests.ranks import run_ranks

pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(120)


def make_trainer(folder, *callbacks, model=None, **options):
    # Imported here, because a fork server that has not loaded transformers runs the two-rank test.
    from transformers import PrinterCallback, Trainer, TrainingArguments

    class WithLoss(Net):
        def forward(self, x, labels=None):
            predicted = super().forward(x)
            return {"loss": (predicted - labels).square().mean(), "logits": predicted}

    xs, ys = inputs_and_targets(64)
    data = [{"x": x, "labels": y} for x, y in zip(xs, ys, strict=True)]
    settings = {
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "max_steps": MAX_STEPS,
        "logging_steps": INTERVAL,
        "max_grad_norm": 1e6,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        **options,
    }
    args = TrainingArguments(output_dir=str(folder), **settings)
    trainer = Trainer(model or WithLoss(), args, train_dataset=data, eval_dataset=data[:8], callbacks=list(callbacks))
    trainer.remove_callback(PrinterCallback)
    return trainer


def make_callback(**options):
    from telemetry.integrations.transformers import RankfoldCallback

    return RankfoldCallback(**options)


def make_witness():
    """Keep the gradients that the Trainer hands to its optimizer, by the step that it is about to count."""
    from transformers import TrainerCallback

    class Witness(TrainerCallback):
        def __init__(self):
            self.seen = {}

        def on_pre_optimizer_step(self, args, state, control, *, model, **kwargs):
            named = {name: p.grad.clone() for name, p in model.named_parameters()}
            self.seen[state.global_step + 1] = named

    return Witness()


def test_rows_stand_on_the_trainers_own_axis_with_the_gradients_that_its_optimizer_used(tmp_path, capsys):
    sink = MemorySink()
    callback, witness = make_callback(sinks=[sink]), make_witness()
    trainer = make_trainer(tmp_path, callback, witness, eval_strategy="steps", eval_steps=2)
    trainer.train()
    history, rows = open_history(tmp_path / "rankfold"), record(tmp_path / "rankfold")
    assert history.steps()["step"].to_pylist() == [step.step for step in sink.steps] == [1, 3, 6, 8]
    assert set(history.steps()["num_micro_batches"].to_pylist()) == {ACCUMULATION}
    assert set(history.steps()["num_applied"].to_pylist()) == {1}
    assert_gradients_are(rows, witness.seen)
    logged = {entry["step"]: entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry}
    assert list(logged) == [3, 6]
    for step, norm in logged.items():
        assert gradient_norm(rows, step) == pytest.approx(norm, rel=1e-6)
    # The evaluations between the steps left nothing: each step has its micro-batches and no more.
    assert {row["total"] for key, row in rows.items() if key[1:] == ("activation", "head")} == {BATCH * ACCUMULATION}
    shown = capsys.readouterr().out
    assert f"  every = {INTERVAL} (TrainingArguments.logging_steps)\n" in shown
    assert f"  hist_every = {4 * INTERVAL} (4 × TrainingArguments.logging_steps)\n" in shown
    assert f"  to = {tmp_path}/rankfold (TrainingArguments.output_dir)\n" in shown
    assert f"{MAX_STEPS} steps, 4 logged, 4 committed" in shown
    assert callback.session is None
    assert callback.report.merge.sinks[0].state == "ok"


def test_argument_beats_environment_beats_the_trainers_own_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("RANKFOLD_EVERY", "4")
    monkeypatch.setenv("RANKFOLD_SELECT", "head*")
    monkeypatch.setenv("RANKFOLD_HIST_EVERY", "2")
    callback = make_callback(show=False, hist_every=None, to=tmp_path / "mine")
    plans = []
    trainer = make_trainer(tmp_path, callback)
    trainer.add_callback(plan_keeper(callback, plans))
    trainer.train()
    (plan,) = plans
    assert {setting.name: setting.origin for setting in plan.settings} == {
        "to": "argument",
        "every": "RANKFOLD_EVERY",
        "select": "RANKFOLD_SELECT",
        "hist_every": "argument",
        "last_step": "the last step of the training",
    }
    assert open_history(tmp_path / "mine").steps()["step"].to_pylist() == [1, 4, 8]


def plan_keeper(callback, plans):
    from transformers import TrainerCallback

    class Keeper(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            plans.append(callback.session.plan)

    return Keeper()


def test_the_kill_switch_leaves_the_training_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANKFOLD_DISABLE", "1")
    make_trainer(tmp_path, make_callback()).train()
    assert "DISABLED" in capsys.readouterr().out
    assert open_history(tmp_path / "rankfold").steps().num_rows == 0


def test_a_training_that_resumes_continues_its_run_and_one_without_a_record_begins_one(tmp_path):
    checkpoint = str(tmp_path / "checkpoint-4")
    saving = {"save_strategy": "steps", "save_steps": 4}
    make_trainer(tmp_path, make_callback(show=False), **saving).train()
    make_trainer(tmp_path, make_callback(show=False)).train(resume_from_checkpoint=checkpoint)
    history = open_history(tmp_path / "rankfold")
    assert [(s["segment"], s["resume_step"]) for s in history.segments().to_pylist()] == [(0, None), (1, 5)]
    newest = history.steps().to_pylist()
    assert [(row["step"], row["segment"]) for row in newest] == [(1, 0), (3, 0), (5, 1), (6, 1), (8, 1)]
    make_trainer(tmp_path, make_callback(show=False, to=tmp_path / "new")).train(resume_from_checkpoint=checkpoint)
    assert open_history(tmp_path / "new").steps()["step"].to_pylist() == [5, 6, 8]


def test_a_refusal_is_raised_before_the_first_step_and_leaves_the_model_free(tmp_path):
    trainer = make_trainer(tmp_path, make_callback(show=False))
    trainer.train()
    before = trainer.model.head.weight.detach().clone()
    with pytest.raises(RunDirectoryInUseError):
        trainer.train()
    assert torch.equal(before, trainer.model.head.weight)


def test_a_training_that_breaks_off_does_not_block_the_next(tmp_path, monkeypatch):
    monkeypatch.setenv("RANKFOLD_TO", str(tmp_path / "first"))
    callback = make_callback(show=False)
    trainer = make_trainer(tmp_path, callback)
    handle = trainer.model.body.register_forward_hook(failing_at(5))
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    handle.remove()
    monkeypatch.setenv("RANKFOLD_TO", str(tmp_path / "second"))
    trainer.train()
    assert open_history(tmp_path / "first").steps()["step"].to_pylist() == [1]
    assert open_history(tmp_path / "second").steps()["step"].to_pylist() == [1, 3, 6, 8]


def failing_at(call):
    calls = []

    def hook(*_):
        calls.append(1)
        if len(calls) == call:
            raise ZeroDivisionError

    return hook


def test_what_the_trainer_decides_is_no_option():
    with pytest.raises(ConfigurationError, match="resume_step"):
        make_callback(resume_step=3)


@pytest.mark.parametrize("framework", ["transformers", "lightning"])
def test_a_missing_framework_is_told_with_the_command(framework, monkeypatch):
    module = f"telemetry.integrations.{framework}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == framework]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, framework, None)
    with pytest.raises(IntegrationUnavailableError, match=rf"pip install 'rankfold\[{framework}\]'") as refusal:
        importlib.import_module(module)
    assert isinstance(refusal.value, ImportError)


def train_on_ranks(rank, world_size, folder):
    os.environ.update(launched(rank, world_size))
    callback = make_callback(signals=("activations", "gradients"))
    make_trainer(folder, callback, ddp_backend="gloo").train()
    dist.barrier()
    return callback.report.merge.num_committed


def test_two_processes_make_one_record_of_both(tmp_path):
    assert run_ranks(train_on_ranks, 2, tmp_path) == [4, 4]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["rankfold"]
    rows, steps = record(tmp_path / "rankfold"), open_history(tmp_path / "rankfold").steps().to_pylist()
    assert {row["num_micro_batches"] for row in steps} == {ACCUMULATION}
    assert [(row["step"], row["num_ranks"]) for row in steps] == [(1, 2), (3, 2), (6, 2), (8, 2)]
    assert rows[3, "activation", "head"]["total"] == 2 * BATCH * ACCUMULATION
    assert rows[3, "gradient", "body.weight"]["total"] == 8 * WIDTH
    assert not open_history(tmp_path / "rankfold").findings().num_rows
