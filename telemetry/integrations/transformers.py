"""The Hugging Face ``Trainer`` drives a session through a callback.

    from telemetry.integrations.transformers import RankfoldCallback

    trainer = Trainer(model, args, train_dataset=data, callbacks=[RankfoldCallback(sinks=[…])])

A step is the Trainer's: one optimizer step with all its micro-batches, numbered as in its own logs, from 1 on.
"""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from telemetry.collect.report import SessionReport
from telemetry.collect.session import Session
from telemetry.collect.settings import Suggested
from telemetry.integrations.driver import SessionDriver, framework_missing

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise framework_missing("transformers", "rankfold[transformers]") from error

__all__ = ["RankfoldCallback"]


class RankfoldCallback(TrainerCallback):
    """Watches the model of a ``Trainer`` on every rank.

    What is set nowhere comes from the ``TrainingArguments``: ``to`` is the folder ``rankfold`` in ``output_dir``,
    ``every`` is ``logging_steps`` and ``hist_every`` four times that, ``last_step`` is the last step of the training.
    Arguments, ``RANKFOLD_…`` variables and a settings file have precedence. A training that resumes from a checkpoint
    continues its run as a new segment; if there is none, a new run begins.

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

    @property
    def session(self) -> Session | None:
        """The live session, None outside of training."""
        return self._driver.session

    @property
    def report(self) -> SessionReport | None:
        """The report of the last training, None before its end."""
        return self._driver.report

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        optimizer: Any,
        **kwargs: Any,
    ) -> None:
        """Attach; the model and the optimizer are those that will train.

        Raises:
            RankfoldError: whatever ``telemetry.watch`` refuses, on all ranks, before the first step.
        """
        self._driver.begin(
            model,
            optimizer,
            suggested=_suggested(args, state),
            resume_step=state.global_step + 1 if state.global_step else None,
        )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, optimizer: Any, **kwargs: Any
    ) -> None:
        """Open the scope of the step that the coming micro-batches make; the Trainer counts it when it is made."""
        self._driver.begin_step(state.global_step + 1, getattr(optimizer, "scaler", None))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Record the step."""
        self._driver.end_step()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the session."""
        self._driver.end()


def _suggested(args: TrainingArguments, state: TrainerState) -> dict[str, Suggested]:
    found = {
        "to": Suggested(os.path.join(args.output_dir, "rankfold"), "TrainingArguments.output_dir"),
        "last_step": Suggested(state.max_steps, "the last step of the training"),
    }
    if args.logging_strategy == "steps":
        # A logging_steps below one is a share of the training; the state has it in steps.
        steps = int(state.logging_steps)
        found["every"] = Suggested(steps, "TrainingArguments.logging_steps")
        found["hist_every"] = Suggested(4 * steps, "4 × TrainingArguments.logging_steps")
    return found
