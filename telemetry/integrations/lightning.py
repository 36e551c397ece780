"""The Lightning ``Trainer`` drives a session through a callback.

    from telemetry.integrations.lightning import RankfoldCallback

    trainer = Trainer(callbacks=[RankfoldCallback(sinks=[…])])

A step is one optimizer step with all its micro-batches, numbered as Lightning numbers the rows of its loggers: from 0
on. With ``log_every_n_steps=10`` both have the rows 9, 19, 29.
"""

from __future__ import annotations

import math
import os
from typing import Any

from telemetry.collect.report import SessionReport
from telemetry.collect.session import Session
from telemetry.collect.settings import Suggested
from telemetry.integrations.driver import SessionDriver, framework_missing

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise framework_missing("lightning", "rankfold[lightning]") from error

__all__ = ["RankfoldCallback"]


class RankfoldCallback(Callback):
    """Watches the module of a Lightning ``Trainer`` on every rank.

    What is set nowhere comes from the Trainer: ``to`` is the folder ``rankfold`` in its ``log_dir``, ``every`` is
    ``log_every_n_steps`` and ``hist_every`` four times that, ``last_step`` is the last step of the training where it is
    known. Arguments, ``RANKFOLD_…`` variables and a settings file have precedence. A training that resumes from a
    checkpoint continues its run as a new segment; if there is none at its place, a new run begins.

    Example:
        >>> callback = RankfoldCallback(signals=("gradients", "updates"), show=False)
    """

    def __init__(self, *, show: bool = True, **options: Any) -> None:
        """Nothing happens before training begins.

        Args:
            show: whether rank zero prints the plan, with the origin of each setting, and at the end the report.
            **options: arguments of ``telemetry.watch``; the optimizer and the steps come from the Trainer.

        Raises:
            ConfigurationError: an option is one of those that come from the Trainer.
        """
        super().__init__()
        self._driver = SessionDriver(options, show=show)
        self._has_stepped = False
        self._is_broken = False

    @property
    def session(self) -> Session | None:
        """The live session, None outside of training."""
        return self._driver.session

    @property
    def report(self) -> SessionReport | None:
        """The report of the last training, None before its end."""
        return self._driver.report

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach; the strategy has set the module and the optimizers up.

        Raises:
            RankfoldError: whatever ``telemetry.watch`` refuses, on all ranks, before the first step.
        """
        first, self._is_broken = _log_step(trainer), False
        self._driver.begin(
            # A wrapper is called once a micro-batch; the module in it is called for that, and by itself again.
            trainer.model or pl_module,
            trainer.optimizers or None,
            suggested=_suggested(trainer, pl_module),
            resume_step=first or None,
            due_offset=1,
        )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Open the scope of a step with the first of its micro-batches."""
        self._has_stepped = False
        if not self._driver.is_in_step and not self._is_broken:
            self._driver.begin_step(_log_step(trainer), getattr(trainer.precision_plugin, "scaler", None))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Remember that this micro-batch is the last one of its step."""
        self._has_stepped = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the step, unless more micro-batches belong to it."""
        if self._has_stepped or not pl_module.automatic_optimization:
            self._driver.end_step()
            self._is_broken = False

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give a step up that a validation breaks into: its forward passes are no part of the training."""
        self._is_broken = self._driver.is_in_step
        self._driver.abandon_step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the session."""
        self._driver.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the session without the step that was broken off; the exception goes on."""
        self._driver.end()


def _log_step(trainer: Trainer) -> int:
    # The number that Lightning gives to its own loggers. Trainer.global_step counts the steps of several optimizers
    # apart, and so runs ahead of it.
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def _suggested(trainer: Trainer, pl_module: LightningModule) -> dict[str, Suggested]:
    folder = os.path.join(trainer.log_dir or trainer.default_root_dir, "rankfold")
    found = {"to": Suggested(folder, "Trainer.log_dir")}
    if steps := trainer.log_every_n_steps:
        found["every"] = Suggested(steps, "Trainer.log_every_n_steps")
        found["hist_every"] = Suggested(4 * steps, "4 × Trainer.log_every_n_steps")
    num_steps = trainer.estimated_stepping_batches
    # A module that steps several optimizers by itself makes fewer rows than steps.
    if pl_module.automatic_optimization and math.isfinite(num_steps):
        found["last_step"] = Suggested(int(num_steps) - 1, "the last step of the training")
    return found
