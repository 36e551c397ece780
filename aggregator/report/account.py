"""Who was there, what was left out, and what it cost: the record's account of itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from aggregator.history import History

__all__ = ["Cost", "ObservationAccount", "RankCoverage", "read_account", "read_cost", "read_coverage"]

_MAX_RANKS: Final = 64


@dataclass(frozen=True, eq=False)
class RankCoverage:
    """Which ranks are in which steps.

    Attributes:
        steps: int64 ``[steps]``.
        ranks: the ranks shown: all of a world of up to 64, else the first 64 that were ever missing or abstained.
        world_size: the largest of all steps.
        state: uint8 ``[ranks, steps]``: 0 the world had no such rank, 1 in the step, 2 abstained, 3 missing.
        num_ranks: int32 ``[steps]``, ranks in each step.
        reasons: (why, in how many rank-steps), most often first.
    """

    steps: NDArray[np.int64]
    ranks: tuple[int, ...]
    world_size: int
    state: NDArray[np.uint8]
    num_ranks: NDArray[np.int32]
    reasons: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class ObservationAccount:
    """Every scheduled observation by what became of it.

    Attributes:
        presence: (kind, presence, reason, number of observations), most first within a kind.
        replicas: (kind, agree, disagree, not checked), numbers of observations.
        disagreeing: (site, kind, first step, number of observations), where replicas differed, most first.
    """

    presence: tuple[tuple[str, str, str, int], ...]
    replicas: tuple[tuple[str, int, int, int], ...]
    disagreeing: tuple[tuple[str, str, int, int], ...]


@dataclass(frozen=True, eq=False)
class Cost:
    """What observing cost, one value a step, NaN where it was not recorded.

    Attributes:
        steps: int64 ``[n]``.
        step_s, self_s, transfer_s, merge_s: seconds of the slowest rank.
        read_bytes: reduced over all ranks; num_budget_dropped: observations left out to keep a budget.
    """

    steps: NDArray[np.int64]
    step_s: NDArray[np.float64]
    self_s: NDArray[np.float64]
    transfer_s: NDArray[np.float64]
    merge_s: NDArray[np.float64]
    read_bytes: NDArray[np.float64]
    num_budget_dropped: NDArray[np.float64]

    @property
    def share(self) -> NDArray[np.float64]:
        """Our part of each step, in percent; NaN of a step that took no time."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.step_s > 0, 100 * self.self_s / self.step_s, np.nan)


def read_coverage(history: History) -> RankCoverage:
    """Read which ranks are in which steps."""
    rows = history.steps()
    missing, abstained = rows["missing_ranks"].to_pylist(), rows["abstained_ranks"].to_pylist()
    world = rows["world_size"].to_numpy()
    world_size = int(world.max(initial=0))
    away = sorted({rank for named in (*missing, *abstained) for rank in named})
    ranks = tuple(range(world_size)) if world_size <= _MAX_RANKS else tuple(away[:_MAX_RANKS])
    place = {rank: i for i, rank in enumerate(ranks)}
    state = (np.array(ranks, np.int64)[:, None] < world[None, :]).astype(np.uint8)
    for code, named in ((2, abstained), (3, missing)):
        for column, gone in enumerate(named):
            state[[place[rank] for rank in gone if rank in place], column] = code
    reasons = Counter(reason for row in rows["missing_reasons"].to_pylist() for reason in row)
    return RankCoverage(
        rows["step"].to_numpy(), ranks, world_size, state, rows["num_ranks"].to_numpy(), tuple(reasons.most_common())
    )


def read_account(history: History) -> ObservationAccount:
    """Count every observation of the record, one file of it in memory at a time."""
    presence: Counter[tuple[str, str, str]] = Counter()
    replicas: Counter[tuple[str, str]] = Counter()
    disagreeing: dict[tuple[str, str], tuple[int, int]] = {}
    columns = ["step", "site", "kind", "presence", "reason", "replicas"]
    for batch in history.observation_batches(columns=columns):
        table = pa.table({name: batch[name].cast(pa.string()) for name in columns[2:]})
        counted = table.group_by(columns[2:]).aggregate([([], "count_all")]).to_pylist()
        for row in counted:
            presence[row["kind"], row["presence"], row["reason"] or ""] += row["count_all"]
            replicas[row["kind"], row["replicas"] or "not_checked"] += row["count_all"]
        for row in batch.filter(pc.equal(batch["replicas"].cast(pa.string()), "disagree")).to_pylist():
            key = row["site"], row["kind"]
            first, count = disagreeing.get(key, (row["step"], 0))
            disagreeing[key] = min(first, row["step"]), count + 1
    kinds = dict.fromkeys(kind for kind, _ in replicas)
    words = ("agree", "disagree", "not_checked")
    return ObservationAccount(
        tuple((*key, count) for key, count in sorted(presence.items(), key=lambda item: (item[0][0], -item[1]))),
        tuple((kind, *(replicas[kind, word] for word in words)) for kind in sorted(kinds)),  # type: ignore[misc]
        tuple((*key, *value) for key, value in sorted(disagreeing.items(), key=lambda item: -item[1][1])),
    )


def read_cost(history: History) -> Cost:
    """Read what each step says of our own cost."""
    rows = history.steps()

    def column(name: str) -> NDArray[np.float64]:
        return np.asarray(rows[name].cast(pa.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)

    names = ("step_s", "self_s", "transfer_s", "merge_s", "read_bytes", "num_budget_dropped")
    return Cost(rows["step"].to_numpy(), *(column(name) for name in names))
