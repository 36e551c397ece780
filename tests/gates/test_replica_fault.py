"""The gate of a flipped bit passes on any number of ranks, and fails where nothing, or something else, differs."""

import pytest
import torch
import torch.distributed as dist

from tests.gates.sabotage import measured_on_ranks, reason_of, rehearsed, sabotaged
from tests.ranks import run_ranks


def measure(to, replace=None, world_size=3):
    return run_ranks(measured_on_ranks, world_size, "replica-fault", (to / "run",), replace)[0]


@pytest.mark.parametrize("world_size", [3, 5])
def test_the_flip_is_named_and_nothing_else_is(tmp_path, world_size):
    measured = measure(tmp_path, world_size=world_size)
    assert reason_of("replica-fault", measured) == ""
    assert "1.weight" in measured["first message"]


def flip_nothing(names):
    names["flip_lowest_bit"] = lambda weight: None


def start_from_other_weights(names):
    seed = torch.manual_seed
    torch.manual_seed = lambda number: seed(number + dist.get_rank())


@pytest.mark.parametrize(
    ("replace", "reason"),
    [
        (flip_nothing, "findings of the flipped weight on the right rank is 0, has to be at least 1"),
        (start_from_other_weights, "findings of anything else is"),
        (start_from_other_weights, "findings before the flip is"),
    ],
)
def test_it_fails_where_replicas_are_equal_or_differ_elsewhere(tmp_path, replace, reason):
    assert reason in reason_of("replica-fault", measure(tmp_path, replace))


@pytest.mark.full
def test_as_a_job_it_fails_where_the_wrong_rank_flips(tmp_path):
    found = sabotaged("replica-fault", tmp_path, "and rank == world_size - 1:", "and rank == 0:")
    reason = "findings of the flipped weight on the right rank is 0, has to be at least 1"
    assert rehearsed(found, tmp_path) == ("failed", reason)
