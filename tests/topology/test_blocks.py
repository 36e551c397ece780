"""Which elements of a logical tensor a rank holds, so that ranks follow the same ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from telemetry import FlatShard, RankRelation, Replica, Shard
from telemetry.block import block_of

WHOLE = np.arange(24).reshape(4, 6)


def positions(block, logical):
    return block.local_positions(np.array(logical))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_an_evenly_split_dim_maps_logical_elements_to_local_ones(dim):
    relation, seen = RankRelation((("dp", Replica()), ("tp", Shard(dim)))), []
    for rank, part in enumerate(np.split(WHOLE, 2, axis=dim)):
        block = block_of(torch.from_numpy(part), relation, {"dp": 3, "tp": 2}, {"dp": 1, "tp": rank})
        assert block.shape == WHOLE.shape
        followed = [0, 5, 7, 13, 23]
        local = positions(block, followed)
        seen += part.reshape(-1)[local].tolist()
    assert sorted(seen) == followed


def test_a_dim_split_over_two_axes_is_split_by_the_outer_one_first():
    relation = RankRelation((("dp", Shard(0)), ("tp", Shard(0))))
    rows = [
        block_of(torch.empty(1, 6), relation, {"dp": 2, "tp": 2}, {"dp": d, "tp": t}).offset[0]
        for d in (0, 1)
        for t in (0, 1)
    ]
    assert rows == [0, 1, 2, 3]


def test_a_flat_interval_and_an_empty_one():
    for start, end, expected in ((2, 9, [0, 6]), (9, 9, [])):
        relation = RankRelation((("dp", FlatShard((3, 4), start, end)),))
        block = block_of(torch.empty(end - start), relation, {"dp": 2}, {"dp": 0})
        assert block.numel == 12
        assert positions(block, [1, 2, 8, 9]).tolist() == expected
