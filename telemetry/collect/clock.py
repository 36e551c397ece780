"""How much of a step is ours: wall time that hooks and the step scope spend on the training thread."""

from __future__ import annotations

import time

__all__ = ["SelfTime"]


class SelfTime:
    """A re-entrant stopwatch: ``with clock:`` adds the outermost block's duration to ``seconds``."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0
        self._started = 0.0

    def reset(self) -> None:
        """Start counting from zero."""
        self.seconds = 0.0

    def __enter__(self) -> SelfTime:
        if self._depth == 0:
            self._started = time.perf_counter()
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.perf_counter() - self._started
