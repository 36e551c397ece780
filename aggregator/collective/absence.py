"""Ranks that are missing, and the error that says so on every rank that is left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from telemetry.errors import AttachTimeoutError, MergeDeadlineError, PeerLostError, RankfoldError

__all__ = ["attach_timeout", "cut_off", "merge_stopped", "name_ranks"]

_SHOWN_RANKS = 16

_REMEDIES: Mapping[type[RankfoldError], str] = {
    MergeDeadlineError: "find out where these ranks hang, or raise deadlines.merge_s if a step may take this long; "
    "training goes on, nothing more is recorded until telemetry.watch is called again",
    PeerLostError: "look into the logs of these ranks for why they ended; training goes on, nothing more is recorded "
    "until telemetry.watch is called again",
}


def attach_timeout(rank: int, late: Mapping[int, str]) -> AttachTimeoutError:
    """Return the error of a rank that came to attach when ``late`` (rank → reason) did not."""
    return AttachTimeoutError(
        f"rank {rank} came to watch, {name_ranks(late)} did not",
        rank=rank,
        failures=late,
        remedy="call telemetry.watch on every rank, or raise deadlines.attach_s if they need longer to start",
    )


def merge_stopped(
    errors: Iterable[RankfoldError], missing: Mapping[int, str], step: int | None
) -> RankfoldError | None:
    """Return why merging stops, or None if there is no reason to.

    Args:
        errors: what this rank and the subtrees below it found; those of absent ranks are replaced by one that names
            all of ``missing``, any other goes first as it is.
        missing: rank → reason, all of them.
        step: the step they are missing from.
    """
    found = list(errors)
    for error in found:
        if not isinstance(error, MergeDeadlineError | PeerLostError):
            return error
    if not found:
        return None
    cls = MergeDeadlineError if any(isinstance(error, MergeDeadlineError) for error in found) else PeerLostError
    what = "the close" if step is None else f"step {step}"
    return cls(f"{name_ranks(missing)} missing at {what}", step=step, failures=missing, remedy=_REMEDIES[cls])


def cut_off(cls: type[RankfoldError], parent: int, reason: str, last_step: int | None) -> RankfoldError:
    """Return the error of a rank that has lost its way to rank zero.

    Args:
        cls: ``MergeDeadlineError`` or ``PeerLostError``.
        parent: the rank above, and all that this rank can see.
        reason: what became of it.
        last_step: the newest step that this rank knows to be in the record.
    """
    known = "no step" if last_step is None else f"step {last_step}"
    return cls(
        f"the way to rank zero is gone: rank {parent} {reason}; {known} is the last known to be recorded",
        failures={parent: reason},
        remedy=_REMEDIES[cls],
    )


def name_ranks(ranks: Iterable[int]) -> str:
    """Return ranks in words, the first few of many."""
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    more = f" and {len(numbers) - _SHOWN_RANKS} more" if len(numbers) > _SHOWN_RANKS else ""
    return f"ranks {', '.join(map(str, numbers[:_SHOWN_RANKS]))}{more}"
