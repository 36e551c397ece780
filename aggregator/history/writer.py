"""Where steps are committed: one writer, on rank zero, one segment of one run.

A commit publishes the tables of one or more steps and then the next generation of the index that lists them; only then
are they acknowledged, and they survive the loss of the process and of the machine. A writer that is killed anywhere
leaves the run as it was after its last commit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from aggregator.catalogue import MergedStep
from aggregator.history.chunks import encode_chunk
from aggregator.history.claim import Claim, begin_run, continue_run, is_own_restart, withdraw
from aggregator.history.fence import publish_generation
from aggregator.history.folder import Folder
from aggregator.history.folding import FoldingPolicy
from aggregator.history.group import GroupCommit, PendingSteps
from aggregator.history.index import ChunkFile, Index
from aggregator.history.intake import Intake
from aggregator.history.layout import segment_folder
from aggregator.history.memory import RecentSteps, keep_recent
from aggregator.history.publish import publish, uncontested
from aggregator.history.snapshot import newest_index
from aggregator.history.sweep import sweep_segment
from aggregator.history.termination import settle_at_exit, settle_at_sigterm
from telemetry.errors import HistoryError, HistoryWriteError, RankfoldError, WriterFencedError
from telemetry.summary.histogram import HistogramDescriptor

__all__ = ["HistoryWriter"]

_STOP_FOLDING_S: Final = 30.0


class HistoryWriter:
    """Writes one segment. Made by :meth:`create`; its methods may be called from any thread.

    Attributes:
        path: the run directory.
        run_id: 32 hexadecimal digits, the same for all segments of a run.
        segment: number of this attempt, 0 for the first.
        resume_step: first step of a segment that continues a run, else None.
        folding_failure: why nothing is folded any more, None while all is well; commits go on without.
    """

    def __init__(
        self,
        path: Path,
        claim: Claim,
        resume_step: int | None,
        group: GroupCommit | None = None,
        folding: FoldingPolicy | None = None,
        recent: RecentSteps | None = None,
    ) -> None:
        self.path = path
        self.run_id = claim.run_id
        self.segment = claim.segment
        self.resume_step = resume_step
        self.folding_failure: BaseException | None = None
        self._group = group or GroupCommit()
        self._folding = folding or FoldingPolicy()
        self._way = claim.way
        self._folder = segment_folder(path, claim.segment)
        self._index = Index(-1, False, resume_step, None, 0, ())
        self._pending = PendingSteps()
        self._timer: threading.Timer | None = None
        self._is_committing = False
        self._commit_s = 0.0
        self._committed_at = float("-inf")
        self._intake = Intake(claim.segment, resume_step)
        self._failure: RankfoldError | None = None
        self._notices: tuple[Mapping[str, Any], ...] = ()
        self._lock = threading.Condition(threading.RLock())
        self._inside = threading.local()
        self._deferred: list[Callable[[], None]] = []
        self._fold = Folder(
            self._folder,
            self._folding,
            self._way,
            self._lock,
            lambda: () if self._index.sealed or self._failure else self._index.files,
            self._replace_files,
            self._fail_folding,
        )
        self._recent = RecentSteps(policy="archived") if recent is None else recent
        self._recent.begin_segment(claim.segment, claim.record)
        keep_recent(path, self._recent)
        settle_at_exit(self)

    @staticmethod
    def create(
        path: Path | str,
        run: Mapping[str, Any],
        descriptor: HistogramDescriptor,
        resume_step: int | None = None,
        *,
        after: int | None = None,
        group: GroupCommit | None = None,
        folding: FoldingPolicy | None = None,
    ) -> HistoryWriter:
        """Begin a run in an empty or new directory, or continue the one that is there with a new segment.

        Args:
            path: the run directory.
            run: the run record, JSON-serialisable; kept in the segment, and for a new run in the manifest.
            descriptor: grid of the histograms, one for the whole run.
            resume_step: None for a new run, else the first step of the continuation. What earlier segments hold from
                this step on is superseded, not deleted. None in a job that its launcher has restarted, where its own
                earlier attempt has written, begins that run anew from step 0: it had no checkpoint yet.
            after: the segment that a continuation must follow, where the caller knows who wrote it; None for any.
            group: how long steps that are appended may wait for others.
            folding: when small files become larger ones.

        Raises:
            RunDirectoryInUseError: a run is there and ``resume_step`` is None, or another process is continuing it, or
                has done so after segment ``after``.
            RunDirectoryForeignError: a new run was asked for in a directory with other files.
            RunDirectoryMissingRunError: ``resume_step`` is given and no run is there.
            RunDirectoryUnwritableError: the directory cannot be made or written.
            SketchDescriptorMismatchError: the run that is there uses another grid.
        """
        directory = Path(path)
        if resume_step is None and is_own_restart(directory):
            resume_step = 0
        if resume_step is None:
            return HistoryWriter(directory, begin_run(directory, run, descriptor), None, group, folding)
        claim = continue_run(directory, run, descriptor, resume_step, after)
        return HistoryWriter(directory, claim, resume_step, group, folding)

    @property
    def last_step(self) -> int | None:
        """Newest committed step of this segment."""
        return self._index.last_step

    @property
    def num_commits(self) -> int:
        """Steps committed in this segment."""
        return self._index.num_commits

    @property
    def failure(self) -> RankfoldError | None:
        """Why no further step can be appended, None while one can."""
        return self._failure

    def commit(self, step: MergedStep) -> None:
        """Make a step durable, and with it all that were appended before.

        Raises:
            StepOrderError: the step is not after the last one, or before the start of the segment; nothing changes.
            WriterFencedError: another process has continued the run.
            HistoryWriteError: the file system refused.

        After any but the first of these every further commit raises the same.
        """
        with self._exclusively():
            self._append(step)
            self._flush()

    def append(self, step: MergedStep) -> Future[MergedStep]:
        """Take a step to be committed, perhaps with others, see :class:`aggregator.history.group.GroupCommit`.

        Another thread writes it, and steps are taken while it does. Only a step with a finding, and one that fills its
        group, are written by the caller.

        Returns:
            Resolved with the step when it is durable, or with the error that kept it from becoming so; in the order of
            steps, on whatever thread commits.

        Raises:
            StepOrderError, WriterFencedError, HistoryWriteError: as for :meth:`commit`; of the group that is full.
        """
        with self._exclusively():
            acknowledgement = self._append(step)
            if self._pending.has_finding or len(self._pending.steps) >= self._group.max_steps:
                self._flush()
            elif not self._is_committing:
                self._commit_in_time()
            return acknowledgement

    def flush(self) -> None:
        """Make durable what was appended.

        Raises:
            WriterFencedError, HistoryWriteError: as for :meth:`commit`.
        """
        with self._exclusively():
            self._flush()

    def close(self) -> None:
        """Commit what is pending and seal the segment. A second call does nothing, nor does one after a failure.

        Raises:
            WriterFencedError, HistoryWriteError: as for :meth:`commit`.
        """
        self._fold.stop(_STOP_FOLDING_S)
        with self._exclusively():
            self._wait_for_commit()
            if self._index.sealed:
                return
            if self._failure is not None:
                self._resolve_pending(self._failure)
                return
            self._flush()
            with self._latching(None):
                self._publish_index(replace(self._index, generation=self._index.generation + 1, sealed=True))
            self._recent.seal()
            self._fold.remove_expired(float("inf"))
            sweep_segment(self._folder)

    def next_segment(self, run: Mapping[str, Any], descriptor: HistogramDescriptor, resume_step: int) -> HistoryWriter:
        """Close this segment and begin the next one of the run, for a replay inside of one process.

        Args:
            run, descriptor, resume_step: see :meth:`create`.

        Returns:
            The writer of the next segment, with the settings of this one.

        Raises:
            WriterFencedError, HistoryWriteError: this segment cannot be sealed.
            RunDirectoryInUseError: another process has claimed the next one.
            RunDirectoryUnwritableError: it cannot be made.
        """
        self.close()
        if self._failure is not None:
            raise self._failure
        try:
            claim = continue_run(self.path, run, descriptor, resume_step, after=self.segment)
        except RankfoldError as error:
            self._failure = error
            raise
        return HistoryWriter(self.path, claim, resume_step, self._group, self._folding, self._recent)

    def abandon(self) -> None:
        """Stop all background work without sealing; what was acknowledged stays. Nothing can be committed after."""
        self._fold.stop(_STOP_FOLDING_S)
        with self._exclusively():
            self._wait_for_commit()
            if self._failure is None:
                self._failure = HistoryWriteError(f"the writer of segment {self.segment} was abandoned")
            self._resolve_pending(self._failure)

    def withdraw(self) -> None:
        """Take the claim back, for an attach that was refused elsewhere; only before the first commit.

        Raises:
            HistoryWriteError: the directory can no longer be written.
        """
        assert self.num_commits == 0, "a segment with commits is never taken back"
        with self._exclusively(), self._latching(None):
            withdraw(self.path, self.segment)
            self._index = Index(0, True, None, None, 0, ())

    def settle(self, deadline_s: float) -> None:
        """Make durable what is pending and stop folding, for the end of the process; see ``termination``."""
        if self._lock.acquire(timeout=deadline_s):
            try:
                is_idle = self._lock.wait_for(lambda: not self._is_committing, deadline_s)
                if is_idle and self._pending.steps and self._failure is None:
                    self._flush()
            finally:
                self._lock.release()
        self._fold.stop(deadline_s)

    def wait_folded(self, timeout_s: float) -> bool:
        """Wait until nothing is being folded; False if it still is after ``timeout_s`` seconds."""
        return self._fold.wait_idle(timeout_s)

    def defer(self, action: Callable[[], None]) -> bool:
        """Do ``action`` when this thread has left the writer; False if it is not inside."""
        if not getattr(self._inside, "depth", 0):
            return False
        self._deferred.append(action)
        return True

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        self._inside.depth = getattr(self._inside, "depth", 0) + 1
        try:
            with self._lock:
                yield
        finally:
            self._inside.depth -= 1
            while self._deferred and not self._inside.depth:
                self._deferred.pop()()

    def _append(self, step: MergedStep) -> Future[MergedStep]:
        if self._failure is not None:
            raise self._failure
        tables = self._intake.take(step, self._notices)
        self._notices = ()
        return self._pending.add(step, tables)

    def _flush(self) -> None:
        """Commit what is pending on this thread, under the lock."""
        if (group := self._take_pending()) is not None:
            try:
                self._commit_group(group)
            except BaseException as error:
                group.resolve(error)
                raise
            self._acknowledge(group)

    def _commit_in_time(self) -> None:
        """Let the timer's thread commit what is pending, at once or when it is time. Called under the lock."""
        if self._timer is None:
            wait_s = self._group.wait_s(self._commit_s, time.monotonic() - self._committed_at)
            self._timer = threading.Timer(wait_s, self._commit_late)
            self._timer.daemon = True
            self._timer.start()
            settle_at_sigterm()

    def _commit_late(self) -> None:
        """Commit what is pending without the lock, so that steps are taken meanwhile; the timer's thread."""
        group: PendingSteps | None = None
        with suppress(RankfoldError), self._exclusively():
            group = self._take_pending()
            self._is_committing = group is not None
        if group is None:
            return
        failure: BaseException | None = None
        try:
            self._commit_group(group)
        except BaseException as error:
            failure = error
        with self._exclusively():
            self._is_committing = False
            if failure is None:
                self._acknowledge(group)
            else:
                group.resolve(failure)
            if self._pending.steps:
                self._commit_in_time()
            self._lock.notify_all()

    def _take_pending(self) -> PendingSteps | None:
        """Return the group that is to be committed next, None if nothing is pending. Called under the lock.

        Raises:
            WriterFencedError, HistoryWriteError: nothing can be committed any more.
        """
        self._fold.wait_for_room()
        self._wait_for_commit()
        if self._failure is not None:
            self._resolve_pending(self._failure)
            raise self._failure
        if not self._pending.steps:
            return None
        self._stop_timer()
        self._pending, group = PendingSteps(), self._pending
        return group

    def _wait_for_commit(self) -> None:
        """Wait until no other thread commits; whoever publishes an index calls this under the lock."""
        self._lock.wait_for(lambda: not self._is_committing)

    def _commit_group(self, group: PendingSteps) -> None:
        begun = time.monotonic()
        with self._latching(group.steps[0].step):
            self._publish_steps(group)
        self._committed_at = time.monotonic()
        self._commit_s = self._committed_at - begun

    def _acknowledge(self, group: PendingSteps) -> None:
        for step, tables in zip(group.steps, group.tables, strict=True):
            self._recent.add(step.step, tables)
        group.resolve(None)
        self._fold.start_if_due()

    def _resolve_pending(self, failure: BaseException) -> None:
        self._stop_timer()
        self._pending, group = PendingSteps(), self._pending
        group.resolve(failure)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @contextmanager
    def _latching(self, step: int | None) -> Iterator[None]:
        """Turn what the file system says into our errors, and stay failed: after a failed sync nothing is certain."""
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except RankfoldError as error:
            self._failure = error
            raise
        except OSError as error:
            self._failure = self._fenced(step) if self._is_fenced(error) else self._unwritable(step, error)
            raise self._failure from error

    def _is_fenced(self, error: OSError) -> bool:
        """Tell whether a successor is why: it has taken the name, or swept away what was about to get it."""
        if isinstance(error, FileExistsError):
            return True
        with suppress(OSError, HistoryError):
            index = newest_index(self._folder)
            return index is not None and index.sealed
        return False

    def _fenced(self, step: int | None) -> WriterFencedError:
        return WriterFencedError(
            f"another process has continued the run in {self.path} after segment {self.segment}",
            step=step,
            remedy="stop this attempt; its steps up to the fence are kept",
        )

    def _unwritable(self, step: int | None, error: OSError) -> HistoryWriteError:
        return HistoryWriteError(
            f"{self._folder} cannot be written: {error.strerror or error}",
            step=step,
            remedy="make room or restore the directory, then continue with resume_step; what was committed is kept",
        )

    def _publish_steps(self, group: PendingSteps) -> None:
        files = self._index.files
        seq = files[-1].seq[1] + 1 if files else 0
        data, entries = encode_chunk(group.joined(), (seq, seq))
        publish(self._folder / entries[0].file, data, uncontested(self._way))
        num_commits = self._index.num_commits + len(group.steps)
        self._publish_index(self._index.followed_by(ChunkFile(entries), group.steps[-1].step, num_commits))

    def _publish_index(self, index: Index) -> None:
        publish_generation(self._folder, index, self._way)
        self._index = index

    def _replace_files(self, inputs: Sequence[ChunkFile], folded: ChunkFile) -> None:
        """Publish an index with one file in place of several; called by the folding thread, under the lock."""
        self._wait_for_commit()
        first, last = inputs[0].seq[0], inputs[-1].seq[1]
        before = [file for file in self._index.files if file.seq[1] < first]
        after = [file for file in self._index.files if file.seq[0] > last]
        with self._latching(None):
            files = (*before, folded, *after)
            self._publish_index(replace(self._index, generation=self._index.generation + 1, files=files))

    def _fail_folding(self, error: BaseException) -> None:
        self.folding_failure = error
        message = f"small files of segment {self.segment} are no longer folded into larger ones: {error}"
        self._notices = (*self._notices, {"code": "folding_failed", "message": message})
