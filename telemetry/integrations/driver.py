"""One session driven by the events of a training framework: what its callbacks have in common."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from torch import nn

from telemetry.collect.report import SessionReport
from telemetry.collect.session import Session, StepScope
from telemetry.collect.settings import Suggested
from telemetry.collect.watch import watch
from telemetry.errors import ConfigurationError, IntegrationUnavailableError, RunDirectoryMissingRunError

__all__ = ["SessionDriver", "framework_missing"]

_LOGGER: Final = logging.getLogger("rankfold")
_TAKEN: Final = ("optimizer", "step", "resume_step", "due_offset")


class SessionDriver:
    """Attaches when training begins, opens a step scope for each optimizer step, and closes when training ends.

    Every rank has one and makes the same calls, from the training thread.

    Attributes:
        session: the live session, None outside of training.
        report: of the last training, None before its end.
        num_abandoned: steps that the framework began and did not end, or broke into with a validation.
    """

    def __init__(self, options: Mapping[str, Any], *, show: bool) -> None:
        """Keep what the user gave to the callback.

        Args:
            options: arguments of ``telemetry.watch``.
            show: whether rank zero prints the plan, with the origin of each setting, and the report.

        Raises:
            ConfigurationError: an option is one that the callback decides.
        """
        if taken := [name for name in _TAKEN if name in options]:
            raise ConfigurationError(
                f"the callback got {', '.join(taken)}", remedy="leave it out; the callback has it from its framework"
            )
        self._options = dict(options)
        self._show = show
        self._scope: StepScope | None = None
        self.session: Session | None = None
        self.report: SessionReport | None = None
        self.num_abandoned = 0

    def begin(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        suggested: Mapping[str, Suggested],
        resume_step: int | None,
        due_offset: int = 0,
    ) -> None:
        """Attach; a session of an earlier training that was broken off is closed first.

        Args:
            model, optimizer: as the framework trains them.
            suggested: settings that the framework's own ones suggest.
            resume_step: the first step, where the framework continues an earlier training. If that one was not
                recorded, a new run begins.
            due_offset: as for ``telemetry.watch``.

        Raises:
            RankfoldError: whatever ``telemetry.watch`` refuses, on all ranks.
        """
        self.end()
        options = {**suggested, **self._options, "optimizer": optimizer, "due_offset": due_offset}
        self.num_abandoned = 0
        try:
            self.session = watch(model, **options, resume_step=resume_step)
        except RunDirectoryMissingRunError:
            self.session = watch(model, **options)
        self._tell(self.session.plan)

    @property
    def is_in_step(self) -> bool:
        """Whether a step scope is open."""
        return self._scope is not None

    def begin_step(self, step: int, scaler: Any = None) -> None:
        """Open the scope of a step; one that is open still is abandoned."""
        self.abandon_step()
        if self.session is not None and self.session.can_open(step):
            self._scope = self.session.step(step, scaler=scaler)
            self._scope.__enter__()

    def end_step(self) -> None:
        """Record the open step, if there is one."""
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.__exit__(None, None, None)

    def abandon_step(self) -> None:
        """Record nothing of the open step, if there is one."""
        scope, self._scope = self._scope, None
        if scope is not None:
            self.num_abandoned += 1
            scope.__exit__(InterruptedError, InterruptedError(), None)

    def end(self) -> None:
        """Close the session and make the report."""
        self.abandon_step()
        session, self.session = self.session, None
        if session is None:
            return
        session.close()
        self.report = session.report
        self._tell(self.report)
        if self.num_abandoned:
            _LOGGER.warning(
                "%d steps were not recorded: the framework broke them off, or validated inside of them",
                self.num_abandoned,
            )

    def _tell(self, what: Any) -> None:
        if self._show and what.rank == 0:
            print(what, flush=True)


def framework_missing(title: str, install: str) -> IntegrationUnavailableError:
    """Return the error for an integration whose framework cannot be imported."""
    return IntegrationUnavailableError(f"{title} is not installed", remedy=f"pip install '{install}'")
