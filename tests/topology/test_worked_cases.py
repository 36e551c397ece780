"""Cases with known answers: what several ranks hold, by placement, and what the merged record must say."""

from __future__ import annotations

import math
from functools import reduce

import numpy as np
import pytest
import torch

from telemetry import FlatShard, Owned, RankRelation, Replica, Shard
from telemetry.errors import PlacementInvalidError
from telemetry.summary import TensorSummary, summarize
from telemetry.summary.experts import count_experts
from telemetry.summary.rows import RowSquares


def merged(*held: tuple[dict, dict, list[float]]) -> TensorSummary:
    """Merge what ranks hold: (axis → placement, axis → coordinate, values)."""
    counted = [
        summarize(torch.tensor(values, dtype=torch.float64))
        if RankRelation(tuple(placements.items())).contributes(at)
        else TensorSummary.empty()
        for placements, at, values in held
    ]
    return reduce(TensorSummary.merge, counted)


TP = {"tp": Shard(0)}


def test_a_shard_adds_to_what_the_other_ranks_bring():
    assert merged((TP, {"tp": 0}, [3, 4]), (TP, {"tp": 1}, [math.sqrt(11)])).l2 == pytest.approx(6)


def test_an_expert_is_counted_by_its_owner_only():
    ranks = [({"ep": Owned(1)}, {"ep": ep}, [13.0]) for ep in (0, 1)]
    shards = [(TP, {"tp": 0}, [3.0, 4.0]), (TP, {"tp": 1}, [math.sqrt(11)])]
    assert merged(*ranks).l2 == pytest.approx(13)
    assert merged(*shards, *ranks).l2 == pytest.approx(math.sqrt(36 + 169))


def test_a_flat_interval_adds_its_elements():
    flat = {"dp": FlatShard((2,), 1, 2)}
    rest = {"dp": FlatShard((2,), 0, 1)}
    assert merged((flat, {"dp": 0}, [12.0]), (rest, {"dp": 1}, [5.0])).l2 == pytest.approx(13)


def test_one_layer_with_every_placement_at_once():
    replica = {"tp": Replica()}
    expert = {"tp": Shard(0), "ep": Owned(0)}
    held = [
        (TP, {"tp": 0}, [3, 4]),
        (TP, {"tp": 1}, [math.sqrt(11)]),
        (TP, {"tp": 0}, [0, 5]),
        (TP, {"tp": 1}, [math.sqrt(7)]),
        (replica, {"tp": 0}, [2]),
        (replica, {"tp": 1}, [2]),
        (expert, {"tp": 0, "ep": 0}, [1]),
        (expert, {"tp": 1, "ep": 0}, [math.sqrt(3)]),
        (expert, {"tp": 0, "ep": 1}, [100]),
    ]
    assert merged(*held, (TP, {"tp": 1}, [math.sqrt(5)])).l2 == pytest.approx(9)


def test_a_mean_is_the_sum_over_all_ranks_divided_once():
    dp = {"dp": Shard()}
    held = [(dp, {"dp": 0}, [1, 3]), (dp, {"dp": 1}, [2, 4]), (dp, {"dp": 2}, [])]
    assert merged(*held).mean == 2.5


@pytest.mark.parametrize("num_experts", [1, 4, 64])
def test_experts_add_in_quadrature(num_experts):
    held = [({"ep": Shard()}, {"ep": i}, [i + 1.0]) for i in range(num_experts)]
    assert merged(*held).l2 == pytest.approx(math.sqrt(sum((i + 1) ** 2 for i in range(num_experts))))


def test_replicas_count_once_and_an_average_of_norms_is_never_taken():
    weight = [1.0] * 5 + [2.0] * 5
    held = [({"tp": Replica(), "dp": Replica()}, {"tp": 0, "dp": dp}, weight) for dp in (0, 1)]
    assert (merged(*held).l2, merged(*held).total) == (pytest.approx(5), 10)


def test_a_tied_embedding_on_two_stages_counts_once():
    tied = [math.sqrt(800 / 8)] * 8
    held = [({"pp": Replica()}, {"pp": stage}, tied) for stage in (0, 3)]
    assert (merged(*held).l2, merged(*held).total) == (pytest.approx(28.284, abs=1e-3), 8)


def test_context_parallel_ranks_are_a_population():
    assert merged(({"cp": Shard()}, {"cp": 0}, [2]), ({"cp": Shard()}, {"cp": 1}, [4])).mean == 3


@pytest.mark.parametrize(
    ("shards", "l2"),
    [([[2.0]] * 4, 4), ([[3.0], [4.0]], 5), ([[3.0], [4.0], []], 5), ([[1.0]] * 4, 2)],
)
def test_shards_of_a_parameter_give_its_norm(shards, l2):
    assert merged(*(({"dp": Shard(0)}, {"dp": i}, shard) for i, shard in enumerate(shards))).l2 == pytest.approx(l2)


def test_an_empty_shard_alone_is_no_data_not_zero():
    empty = merged(({"dp": Shard(0)}, {"dp": 0}, []))
    assert empty.finite == 0
    assert math.isnan(empty.l2)
    assert math.isnan(empty.mean)


def test_sequences_of_different_length_on_every_axis_and_two_virtual_stages():
    placements = {"pp": Shard(), "cp": Shard(), "tp": Replica()}
    held = [
        (placements, {"pp": pp, "cp": cp, "tp": tp}, [values])
        for pp, cp, values in ((0, 0, 3.0), (0, 1, 5.0))
        for tp in (0, 1)
    ]
    assert (merged(*held).total, merged(*held).sum) == (2, 8)


def test_row_norms_of_a_flat_shard_that_cuts_through_rows():
    here = RowSquares.of(np.array([0.0, 0, 0, 0, 5, 12, 8]), FlatShard((3, 4), 2, 9))
    elsewhere = RowSquares(np.array([25.0, 0, 225]), np.array([2, 0, 3]))
    whole = here.merge(elsewhere)
    assert whole.mean_norm == pytest.approx(35 / 3)
    assert whole.counts.tolist() == [4, 4, 4]


def test_row_norms_over_three_ranks_of_which_one_is_empty():
    matrix = np.array([3.0, 4, 0, 0, 0, 5, 12, 0])
    parts = [RowSquares.of(matrix[a:b], FlatShard((2, 4), a, b)) for a, b in ((0, 3), (3, 8), (8, 8))]
    whole = reduce(RowSquares.merge, parts)
    assert whole.mean_norm == 9
    assert whole.counts.sum() == 8


def test_row_norms_refuse_values_that_do_not_fit_the_interval():
    with pytest.raises(PlacementInvalidError, match="interval 2:9"):
        RowSquares.of(np.zeros(3), FlatShard((3, 4), 2, 9))


ROUTES = torch.tensor([[0, 2], [1, 3], [2, 3], [0, -1]])
MULTIPLICITY = torch.tensor([3, 1, 2, 0])


@pytest.mark.parametrize(("padded", "expected"), [(None, [3, 1, 5, 3]), (1, [3, 0, 5, 2])])
def test_tokens_of_each_expert_with_multiplicities_and_padding(padded, expected):
    padding = None if padded is None else torch.arange(4) == padded
    counts = count_experts(ROUTES, 4, multiplicity=MULTIPLICITY, padding=padding)
    assert counts.tolist() == expected
    assert counts.dtype is torch.int64


def test_raw_fourth_moments_follow_from_the_record():
    values = torch.zeros(4097, dtype=torch.bfloat16)
    values[5], values[9] = 2, -3
    s = summarize(values)
    fourth = s.m4 + 4 * s.mean * s.m3 + 6 * s.mean**2 * s.m2 + s.finite * s.mean**4
    assert (s.sum_abs, s.sum_sq, s.zero) == (5, 13, 4095)
    assert fourth == pytest.approx(97)
