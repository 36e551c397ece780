"""The thread that folds beside the commits: started when something is due, gone when nothing is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from aggregator.history.folding import FoldingPolicy, fold, foldable
from aggregator.history.index import ChunkFile

__all__ = ["Folder"]


class _GivenUpError(Exception):
    """The segment is closing, or nobody writes it any more."""


class Folder:
    """Folds the files of one segment.

    Args:
        segment: its folder.
        policy: when files are due.
        way: how files are published in this run.
        lock: held by whoever publishes an index; ``files`` and ``replace`` are called under it.
        files: returns the files of the newest index.
        replace: publishes an index with one file in place of several.
        fail: is told what went wrong; nothing is folded after that.
    """

    def __init__(
        self,
        segment: Path,
        policy: FoldingPolicy,
        way: str,
        lock: threading.Condition,
        files: Callable[[], Sequence[ChunkFile]],
        replace: Callable[[Sequence[ChunkFile], ChunkFile], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._segment, self._policy, self._way, self._lock = segment, policy, way, lock
        self._files, self._replace, self._fail = files, replace, fail
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._expired: list[tuple[float, str]] = []

    def start_if_due(self) -> None:
        """Begin to fold, unless it is going on, has failed, or nothing is due. Called under the lock."""
        self.remove_expired(time.monotonic())
        idle = self._thread is None
        if idle and not self._stopped and foldable(self._files(), self._policy):
            self._thread = threading.Thread(target=self._run, name="rankfold-fold", daemon=True)
            self._thread.start()

    def wait_for_room(self) -> None:
        """Hold a commit back while too much is unfolded. Called under the lock, which is let go meanwhile."""
        deadline = time.monotonic() + self._policy.max_wait_s
        while self._thread is not None and not self._stopped and self._num_unfolded() >= self._policy.max_unfolded:
            left = deadline - time.monotonic()
            if left <= 0 or not self._lock.wait(left):
                return

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is being folded; False if it still is after ``timeout_s`` seconds."""
        with self._lock:
            return self._lock.wait_for(lambda: self._thread is None, timeout_s)

    def stop(self, timeout_s: float) -> None:
        """Give up what is being folded, and fold nothing more."""
        self._stopped = True
        self.wait_idle(timeout_s)

    def remove_expired(self, now: float) -> None:
        """Remove files that were folded longer than the grace period ago."""
        while self._expired and self._expired[0][0] <= now:
            with suppress(OSError):
                (self._segment / self._expired.pop(0)[1]).unlink()

    def _num_unfolded(self) -> int:
        return sum(file.level == 0 for file in self._files())

    def _run(self) -> None:
        try:
            while inputs := self._due():
                self._fold(inputs)
        except _GivenUpError:
            pass
        except BaseException as error:
            with self._lock:
                self._stopped = True
                self._fail(error)
        finally:
            with self._lock:
                self._thread = None
                self._lock.notify_all()

    def _due(self) -> tuple[ChunkFile, ...]:
        with self._lock:
            return () if self._stopped else foldable(self._files(), self._policy)

    def _fold(self, inputs: tuple[ChunkFile, ...]) -> None:
        folded = fold(self._segment, inputs, self._way, self._check_going)
        with self._lock:
            self._check_going()
            self._replace(inputs, folded)
            expires = time.monotonic() + self._policy.grace_s
            names = dict.fromkeys(entry.file for file in inputs for entry in file.entries)
            self._expired += [(expires, name) for name in names]
            self._lock.notify_all()

    def _check_going(self) -> None:
        if self._stopped:
            raise _GivenUpError
