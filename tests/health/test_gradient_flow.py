"""Gradients are compared with those of the same part one layer nearer to the loss."""

import pytest

from aggregator.health import Thresholds
from aggregator.testing import make_site
from tests.health.streams import findings_of, told, weight


def gradients(*sizes, name="layers.{}.mlp.weight", kind="gradient"):
    return {weight(name.format(i), kind): [size, -size] for i, size in enumerate(sizes)}


def test_a_gradient_that_grows_towards_the_input_is_exploding():
    (finding,) = findings_of({3: gradients(5000.0, 10.0, 1.0)})
    assert told([finding]) == [("gradient_exploding", 3, "layers.0.mlp.weight")]
    (named,) = finding["sites"]
    assert (named["rms"], named["neighbour_rms"], named["ratio"]) == (5000.0, 10.0, 500.0)
    assert named["neighbour"] == "layers.1.mlp.weight"
    assert finding["thresholds"] == {"gradient_ratio": 100.0}


def test_a_gradient_that_shrinks_towards_the_input_is_vanishing():
    (finding,) = findings_of({3: gradients(1e-5, 1.0, 1.0)})
    assert told([finding]) == [("gradient_vanishing", 3, "layers.0.mlp.weight")]


def test_a_gradient_that_is_all_zero_behind_one_that_is_not_has_vanished():
    (finding,) = findings_of({1: gradients(0.0, 1.0)})
    assert (finding["code"], finding["sites"][0]["ratio"]) == ("gradient_vanishing", 0.0)


def test_the_limit_itself_is_fine_and_the_worst_pair_is_named_first():
    assert findings_of({1: gradients(100.0, 1.0)}) == []
    (finding,) = findings_of({1: gradients(1e9, 1e6, 1.0)})
    assert [named["site"] for named in finding["sites"]] == ["layers.1.mlp.weight", "layers.0.mlp.weight"]


def test_layers_without_the_part_are_stepped_over():
    found = findings_of({1: {weight("0.weight", "gradient"): [1e4], weight("2.weight", "gradient"): [1.0]}})
    assert told(found) == [("gradient_exploding", 1, "0.weight")]


@pytest.mark.parametrize(
    "observed",
    [
        {weight("a", "gradient"): [1e9], weight("b", "gradient"): [1.0]},
        {weight("layers.0.a", "gradient"): [1e9], weight("layers.1.b", "gradient"): [1.0]},
        {make_site("layers.0.bias", "gradient"): [1e9], make_site("layers.1.bias", "gradient"): [1.0]},
        {weight("layers.0.a", "gradient"): [1.0], weight("layers.1.a", "gradient"): [0.0]},
        {weight("layers.0.a", "gradient"): [1.0], weight("layers.1.a", "gradient"): [float("nan")]},
        {weight("layers.0.a", "gradient"): [0.0], weight("layers.1.a", "gradient"): [0.0]},
    ],
    ids=["no layers", "other parts", "vectors", "none nearer to the loss", "nothing finite", "no gradient at all"],
)
def test_what_cannot_be_compared_is_not(observed):
    assert [f for f in findings_of({1: observed}) if f["code"].startswith("gradient_")] == []


def test_gradients_of_activations_are_judged_too():
    found = findings_of({1: {make_site(f"h.{i}", "activation_grad"): [s] for i, s in enumerate((1e3, 1.0))}})
    assert told(found) == [("gradient_exploding", 1, "h.0")]


def test_a_wider_limit_lets_it_pass():
    assert findings_of({1: gradients(5000.0, 10.0)}, Thresholds(gradient_ratio=1000.0)) == []
