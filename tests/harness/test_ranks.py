"""The harness that all multi-rank tests rely on must itself never hang and never hide a failure."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankDied, RanksError, run_ranks


def _sum_of_ranks(rank, world_size, offset):
    value = torch.tensor([rank + offset])
    dist.all_reduce(value)
    return rank, value.item()


def _raise_on_one(rank, world_size):
    if rank == 1:
        raise ValueError("rank one is unhappy")
    return rank


def _die_on_one(rank, world_size):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def _hang_on_one(rank, world_size):
    if rank == 1:
        threading.Event().wait()
    return rank


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_every_rank_runs_the_body_in_one_group(world_size):
    total = sum(range(world_size)) + 10 * world_size
    assert run_ranks(_sum_of_ranks, world_size, 10) == [(rank, total) for rank in range(world_size)]


def test_an_exception_of_a_rank_is_raised_with_its_traceback():
    with pytest.raises(RanksError, match="rank one is unhappy") as caught:
        run_ranks(_raise_on_one, 2)
    assert set(caught.value.failures) == {1}
    assert isinstance(caught.value.__cause__, ValueError)
    assert "_raise_on_one" in caught.value.failures[1]


def test_a_killed_rank_is_reported_by_its_exit_code():
    with pytest.raises(RanksError, match="exit code -9"):
        run_ranks(_die_on_one, 2)


def test_a_rank_that_may_die_leaves_its_exit_code_in_the_results():
    assert run_ranks(_die_on_one, 2, may_die={1}) == [0, RankDied(-signal.SIGKILL)]


def test_a_hung_rank_is_killed_at_the_deadline_and_shows_its_stack():
    begun = time.monotonic()
    with pytest.raises(RanksError, match="still running at the deadline") as caught:
        run_ranks(_hang_on_one, 2, deadline_s=2)
    assert set(caught.value.failures) == {1}
    assert "_hang_on_one" in caught.value.failures[1]
    assert time.monotonic() - begun < 30
