"""The real Lightning Trainer on CPUs: its steps, the rows of its loggers, its interval, one process and two."""

import csv
import os

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from aggregator import open_history
from aggregator.sinks import MetricLoggerSink
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

pytest.importorskip("lightning")
pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]


def make_module(**options):
    # Imported here, because a fork server that has not loaded lightning runs the two-rank test.
    from lightning.pytorch import LightningModule

    class Regression(LightningModule):
        def __init__(self, fail_at=None, manual=False):
            super().__init__()
            self.net, self.fail_at, self.seen = Net(), fail_at, {}
            self.automatic_optimization = not manual

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, index):
            if index == self.fail_at:
                raise ZeroDivisionError
            loss = (self(batch[0]) - batch[1]).square().mean()
            if not self.automatic_optimization:
                self.step_both(loss)
            return loss

        def step_both(self, loss):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()

        def validation_step(self, batch, index):
            self.log("validation", (self(batch[0]) - batch[1]).square().mean())

        def on_before_optimizer_step(self, optimizer):
            gradients = {name: p.grad.clone() for name, p in self.named_parameters()}
            self.seen[len(self.seen)] = gradients
            self.log("norm", torch.cat([g.flatten().double() for g in gradients.values()]).norm())

        def configure_optimizers(self):
            if self.automatic_optimization:
                return torch.optim.AdamW(self.parameters(), lr=0.01)
            return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.net.body, self.net.head)]

    return Regression(**options)


def make_callback(**options):
    from telemetry.integrations.lightning import RankfoldCallback

    return RankfoldCallback(**options)


def fit(folder, callback, module=None, *, ckpt_path=None, **options):
    from lightning.pytorch import Trainer
    from lightning.pytorch.loggers import CSVLogger

    settings = {
        "max_steps": MAX_STEPS,
        "accumulate_grad_batches": ACCUMULATION,
        "log_every_n_steps": INTERVAL,
        "accelerator": "cpu",
        "logger": CSVLogger(folder, version=0),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        **options,
    }
    trainer = Trainer(default_root_dir=folder, callbacks=[callback], **settings)
    data = TensorDataset(*inputs_and_targets(64))
    module = module or make_module()
    trainer.fit(module, DataLoader(data, BATCH), DataLoader(data, 2 * BATCH), ckpt_path=ckpt_path)
    return trainer, module


def rows_of_the_logger(trainer, column):
    with open(os.path.join(trainer.log_dir, "metrics.csv")) as file:
        return {int(row["step"]): float(row[column]) for row in csv.DictReader(file) if row[column]}


def test_rows_are_those_of_lightnings_own_loggers_with_the_gradients_that_its_optimizer_used(tmp_path, capsys):
    callback = make_callback()
    trainer, module = fit(tmp_path, callback)
    folder = os.path.join(trainer.log_dir, "rankfold")
    history, rows = open_history(folder), record(folder)
    assert history.steps()["step"].to_pylist() == [0, 2, 5, 7]
    assert set(history.steps()["num_micro_batches"].to_pylist()) == {ACCUMULATION}
    assert set(history.steps()["num_applied"].to_pylist()) == {1}
    assert_gradients_are(rows, module.seen)
    logged = rows_of_the_logger(trainer, "norm")
    assert list(logged) == [2, 5]
    for step, norm in logged.items():
        assert gradient_norm(rows, step) == pytest.approx(norm, rel=1e-6)
    totals = {row["total"] for key, row in rows.items() if key[1:] == ("activation", "net.head")}
    assert totals == {BATCH * ACCUMULATION}
    shown = capsys.readouterr().out
    assert f"  every = {INTERVAL} (Trainer.log_every_n_steps)\n" in shown
    assert f"  hist_every = {4 * INTERVAL} (4 × Trainer.log_every_n_steps)\n" in shown
    assert f"  to = {folder} (Trainer.log_dir)\n" in shown
    assert f"{MAX_STEPS} steps, 4 logged, 4 committed" in shown
    assert callback.session is None


def test_updates_are_what_the_optimizer_changed_in_the_step(tmp_path):
    module = make_module()
    first = module.net.head.weight.detach().clone()
    fit(tmp_path, make_callback(show=False, every=1, to=tmp_path / "run"), module)
    rows = record(tmp_path / "run")
    total = sum(rows[step, "update", "net.head.weight"]["sum"] for step in range(MAX_STEPS))
    assert total == pytest.approx(float((module.net.head.weight.double() - first.double()).sum()), rel=1e-6)


def test_a_logger_of_lightnings_can_be_a_sink_and_argument_beats_environment(tmp_path, monkeypatch, capsys):
    from lightning.pytorch.loggers import CSVLogger

    monkeypatch.setenv("RANKFOLD_EVERY", "2")
    monkeypatch.setenv("RANKFOLD_SELECT", "net.head*")
    logger = CSVLogger(tmp_path, name="telemetry")
    sink = MetricLoggerSink(logger, fields=["rms"])
    fit(tmp_path, make_callback(sinks=[sink], every=4, to=tmp_path / "run"))
    shown = capsys.readouterr().out
    assert "  every = 4 (argument)\n" in shown
    assert "  select = net.head* (RANKFOLD_SELECT)\n" in shown
    with open(os.path.join(logger.log_dir, "metrics.csv")) as file:
        lines = list(csv.DictReader(file))
    series = open_history(tmp_path / "run").series("net.head.weight", "gradient", "rms").to_pydict()
    assert [int(line["step"]) for line in lines] == series["step"] == [0, 3, 7]
    assert [float(line["gradient/net.head.weight/rms"]) for line in lines] == series["value"]


def test_a_training_that_resumes_continues_its_run(tmp_path):
    callback = make_callback(show=False, to=tmp_path / "run")
    trainer, _ = fit(tmp_path, callback, max_steps=4)
    trainer.save_checkpoint(tmp_path / "four.ckpt")
    callback = make_callback(show=False, to=tmp_path / "run")
    fit(tmp_path, callback, ckpt_path=tmp_path / "four.ckpt")
    history = open_history(tmp_path / "run")
    assert [(s["segment"], s["resume_step"]) for s in history.segments().to_pylist()] == [(0, None), (1, 4)]
    assert [(row["step"], row["segment"]) for row in history.steps().to_pylist()] == [
        (0, 0),
        (2, 0),
        (3, 0),
        (4, 1),
        (5, 1),
        (7, 1),
    ]


def test_a_validation_inside_of_a_step_gives_that_step_up_and_no_other(tmp_path, caplog):
    callback = make_callback(show=False, every=1, to=tmp_path / "run")
    fit(tmp_path, callback, val_check_interval=3, num_sanity_val_steps=0)
    history, rows = open_history(tmp_path / "run"), record(tmp_path / "run")
    # A validation after every third batch breaks into every third step of two batches.
    assert history.steps()["step"].to_pylist() == [0, 2, 3, 5, 6]
    assert set(history.steps()["num_micro_batches"].to_pylist()) == {ACCUMULATION}
    assert {row["total"] for key, row in rows.items() if key[1:] == ("activation", "net.head")} == {8}
    assert "3 steps were not recorded" in caplog.text


def test_two_optimizers_that_the_module_steps_by_itself_make_one_row_a_batch(tmp_path):
    module = make_module(manual=True)
    fit(tmp_path, make_callback(show=False, every=1, to=tmp_path / "run"), module, accumulate_grad_batches=1)
    steps = open_history(tmp_path / "run").steps().to_pylist()
    # max_steps counts the steps of both; Lightning's loggers count batches.
    assert [row["step"] for row in steps] == list(range(MAX_STEPS // 2))
    assert {row["num_optimizer_steps"] for row in steps} == {2}


def test_an_exception_of_the_training_passes_and_leaves_the_steps_before_it(tmp_path):
    callback = make_callback(show=False, every=1, to=tmp_path / "run")
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, callback, make_module(fail_at=5))
    assert open_history(tmp_path / "run").steps()["step"].to_pylist() == [0, 1]
    assert callback.report.num_steps == 2


def fit_on_ranks(rank, world_size, folder):
    os.environ.update(launched(rank, world_size))
    callback = make_callback(signals=("activations", "gradients"))
    fit(folder, callback, strategy="ddp", devices=world_size)
    dist.barrier()
    return callback.report.merge.num_committed


def test_two_processes_make_one_record_of_both(tmp_path):
    assert run_ranks(fit_on_ranks, 2, tmp_path) == [4, 4]
    (folder,) = tmp_path.rglob("rankfold")
    rows, steps = record(folder), open_history(folder).steps().to_pylist()
    assert {row["num_micro_batches"] for row in steps} == {ACCUMULATION}
    assert [(row["step"], row["num_ranks"]) for row in steps] == [(0, 2), (2, 2), (5, 2), (7, 2)]
    assert rows[2, "activation", "net.head"]["total"] == 2 * BATCH * ACCUMULATION
    assert rows[2, "gradient", "net.body.weight"]["total"] == 8 * WIDTH
    assert not open_history(folder).findings().num_rows
