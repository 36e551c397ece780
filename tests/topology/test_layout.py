"""The axes of a job and each rank's place on them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from telemetry import FlatShard, Owned, ParallelLayout, Partial, RankRelation, Replica, Shard
from telemetry.errors import ConfigurationError, LayoutMismatchError, PlacementInvalidError
from tests.ranks import run_ranks


def test_ranks_count_up_over_the_axes_with_the_innermost_fastest():
    layout = ParallelLayout.from_sizes({"pp": 2, "dp": 2, "cp": 1, "tp": 2})
    assert layout.coordinates(0) == {"pp": 0, "dp": 0, "cp": 0, "tp": 0}
    assert layout.coordinates(5) == {"pp": 1, "dp": 0, "cp": 0, "tp": 1}


def test_megatron_order_is_innermost_first():
    sizes = {"tp": 2, "dp": 2, "pp": 2}
    layout = ParallelLayout.from_sizes(sizes, order="tp-cp-ep-dp-pp")
    assert layout.axes == (("pp", 2), ("dp", 2), ("tp", 2))
    with pytest.raises(ConfigurationError, match="lacks the axes dp"):
        ParallelLayout.from_sizes(sizes, order="tp-pp")


def test_a_world_that_is_not_the_product_is_refused_with_the_numbers():
    layout = ParallelLayout.from_sizes({"dp": 2, "tp": 4})
    with pytest.raises(LayoutMismatchError, match=r"8 ranks \(dp 2 × tp 4\), the job has 6"):
        layout.require_world_size(6)


def test_the_dense_and_the_expert_grid_hold_the_same_ranks():
    layout = ParallelLayout.from_sizes({"dp": 4, "tp": 2}, expert={"edp": 2, "ep": 4, "etp": 1})
    assert layout.coordinates(3) == {"dp": 1, "tp": 1}
    assert layout.coordinates(3, expert=True) == {"edp": 0, "ep": 3, "etp": 0}
    with pytest.raises(LayoutMismatchError, match=r"8 ranks .*expert grid 4"):
        ParallelLayout.from_sizes({"dp": 4, "tp": 2}, expert={"ep": 4})


@pytest.mark.parametrize("sizes", [{"dp": 0}, {"dp": -1}])
def test_an_axis_below_one_is_refused(sizes):
    with pytest.raises(ConfigurationError, match="below one"):
        ParallelLayout.from_sizes(sizes)


def group(size: int, rank: int) -> SimpleNamespace:
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def test_a_process_group_collection_gives_sizes_and_own_coordinates():
    groups = SimpleNamespace(tp=group(2, 1), cp=group(2, 0), dp_cp=group(4, 2), pp=group(2, 1), ep=group(2, 1))
    groups.expt_dp = group(4, 3)
    layout = ParallelLayout.from_process_groups(groups)
    assert dict(layout.axes) == {"pp": 2, "dp": 2, "gtp": 1, "cp": 2, "tp": 2}
    assert layout.coordinates(99) == {"pp": 1, "dp": 1, "gtp": 0, "cp": 0, "tp": 1}
    assert layout.expert is not None
    assert layout.coordinates(99, expert=True) == {"pp": 1, "edp": 3, "egtp": 0, "ep": 1, "etp": 0}


def test_a_missing_process_group_has_size_one():
    layout = ParallelLayout.from_process_groups(SimpleNamespace(dp=group(8, 5)))
    assert layout.world_size == 8
    assert layout.expert is None


def mesh_layouts(rank: int, world_size: int) -> tuple[object, object]:
    import torch
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    shuffled = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("dp", "tp"))
    return tuple(dict(ParallelLayout.from_mesh(mesh).coordinates(rank)) for mesh in (named, shuffled))


def test_a_device_mesh_gives_the_coordinates_that_it_gives_itself():
    found = run_ranks(mesh_layouts, 4)
    assert [named for named, _ in found] == [{"dp": d, "tp": t} for d in (0, 1) for t in (0, 1)]
    assert [shuffled for _, shuffled in found] == [{"dp": d, "tp": t} for t in (0, 1) for d in (0, 1)]


def relation(**placements) -> RankRelation:
    return RankRelation(tuple(placements.items()))


@pytest.mark.parametrize(
    ("placements", "coordinates", "counts"),
    [
        ({"tp": Replica(), "dp": Shard()}, {"tp": 0, "dp": 3}, True),
        ({"tp": Replica(), "dp": Shard()}, {"tp": 1, "dp": 0}, False),
        ({"ep": Owned(2)}, {"ep": 2}, True),
        ({"ep": Owned(2)}, {"ep": 0}, False),
        ({"dp": FlatShard((3, 4), 2, 9)}, {"dp": 5}, True),
        ({}, {}, True),
    ],
)
def test_a_rank_counts_if_it_is_first_on_replica_axes_and_owns_the_slot(placements, coordinates, counts):
    assert relation(**placements).contributes(coordinates) is counts


@pytest.mark.parametrize("interval", [(-1, 3), (5, 4), (0, 13)])
def test_a_flat_interval_outside_of_the_tensor_is_refused(interval):
    with pytest.raises(PlacementInvalidError, match="12 elements"):
        FlatShard((3, 4), *interval)


def test_an_axis_that_the_layout_lacks_is_refused_by_name():
    with pytest.raises(PlacementInvalidError, match="no axis 'cp' in the layout; its axes are dp, tp"):
        relation(dp=Shard(), tp=Replica()).replace({"cp": Replica()})


def test_partial_axes_are_told_and_placements_read_as_words():
    placed = relation(tp=Partial("sum"), dp=Shard(0), cp=Shard(), ep=Owned(1), x=FlatShard((2, 3), 0, 1))
    assert placed.partial_axes == ("tp",)
    words = ["partial(sum)", "shard(0)", "shard", "owned(1)", "flat_shard(2,3)"]
    assert [text for _, text in placed.describe()] == words
