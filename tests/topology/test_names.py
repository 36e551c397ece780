"""Names of sites: the same for one thing on all ranks, different for different things."""

from __future__ import annotations

import pytest
from torch import nn
from torch.nn.parallel import DataParallel

from telemetry.collect.names import ModelNames


class Layer(nn.Module):
    def __init__(self, number: int | None = None) -> None:
        super().__init__()
        self.mlp = nn.Linear(2, 2)
        if number is not None:
            self.layer_number = number


class Stage(nn.Module):
    def __init__(self, *numbers: int | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(number) for number in numbers)
        self.norm = nn.LayerNorm(2)


def names(*chunks: nn.Module, **options) -> dict[str, tuple[str, ...]]:
    return {name: aliases for name, _, aliases, _ in ModelNames(chunks, **options).parameters() if "weight" in name}


def test_wrappers_leave_no_trace_in_names():
    wrapped = nn.Module()
    wrapped.add_module("_checkpoint_wrapped_module", nn.Linear(2, 2))
    model = DataParallel(nn.Sequential(wrapped))
    assert names(model) == {"0.weight": ()}


def test_layer_numbers_make_names_global_and_keep_the_local_one():
    assert names(Stage(5, 6), stage=2) == {
        "layers.4.mlp.weight": ("layers.0.mlp.weight",),
        "layers.5.mlp.weight": ("layers.1.mlp.weight",),
        "norm.weight": (),
    }


def test_virtual_stages_with_layer_numbers_do_not_collide():
    first, second = Stage(1), Stage(3)
    del second.norm
    assert set(names(first, second, stage=0)) == {"layers.0.mlp.weight", "layers.2.mlp.weight", "norm.weight"}


@pytest.mark.parametrize("stage", [0, 1])
def test_stages_without_any_rule_get_their_number_in_front(stage):
    assert set(names(Stage(None), stage=stage)) == {f"stage{stage}.layers.0.mlp.weight", f"stage{stage}.norm.weight"}


def test_virtual_stages_without_layer_numbers_get_the_number_of_the_chunk():
    found = names(nn.Linear(2, 2), nn.Linear(2, 2))
    assert found == {"model_chunk0.weight": ("weight",), "model_chunk1.weight": ("weight",)}


def test_a_rule_of_the_user_wins():
    found = names(Stage(None), stage=1, rule=lambda name: name.replace("layers.0", "layers.7"))
    assert found == {"layers.7.mlp.weight": ("layers.0.mlp.weight",), "norm.weight": ()}


def test_a_tied_parameter_is_one_with_both_names():
    model = nn.ModuleDict({"embed": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False)})
    model["head"].weight = model["embed"].weight
    assert names(model) == {"embed.weight": ("head.weight",)}
