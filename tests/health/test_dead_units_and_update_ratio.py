"""Dead units and weights that move by the wrong share of their size, both told when they are seen twice."""

from dataclasses import replace

from aggregator.health import Thresholds
from aggregator.testing import make_site
from telemetry.packet import StepFacts
from tests.health.streams import findings_of, told, weight

RELU = make_site("relu")
DEAD, ALIVE = [0.0] * 99 + [1.0], [0.0, 1.0]


def test_an_activation_that_stays_zero_is_dead_and_says_how_much_of_it():
    (finding,) = findings_of({50: {RELU: DEAD}, 100: {RELU: DEAD}})
    assert told([finding]) == [("units_dead", 100, "relu")]
    (named,) = finding["sites"]
    assert (named["zero"], named["total"], named["zero_fraction"], named["first_step"]) == (99, 100, 0.99, 50)


def test_one_dead_observation_is_none_and_neither_are_two_with_life_between():
    assert findings_of({1: {RELU: DEAD}, 2: {RELU: ALIVE}, 3: {RELU: DEAD}}) == []


def test_gradients_that_are_zero_are_no_dead_units():
    site = make_site("relu", "activation_grad")
    assert findings_of({1: {site: DEAD}, 2: {site: DEAD}}) == []


def moved(update, size=1.0, name="w", **changes):
    update_site = replace(weight(name, "update"), **changes)
    return {update_site: [update, -update], replace(weight(name, "parameter"), **changes): [size, -size]}


def test_an_update_of_half_the_weight_is_too_large():
    (finding,) = findings_of({1: moved(1.0, 2.0), 2: moved(1.0, 2.0)})
    assert told([finding]) == [("update_too_large", 2, "w")]
    assert finding["sites"][0]["ratio"] == 0.5
    assert finding["thresholds"] == {"update_ratio_high": 0.1}


def test_an_update_that_the_dtype_swallowed_is_too_small():
    (finding,) = findings_of({1: moved(0.0), 2: moved(0.0)})
    assert told([finding]) == [("update_too_small", 2, "w")]


def test_a_ratio_in_the_band_a_vector_and_a_zero_weight_are_fine():
    for observed in (moved(1e-3), moved(1.0, shape=(16,)), moved(1.0, 0.0)):
        assert findings_of({1: observed, 2: observed}) == []


def test_a_step_that_the_optimizer_skipped_says_nothing_about_updates():
    skipped = StepFacts(num_skipped=1, skipped_ranks=(0,))
    assert findings_of({1: moved(0.0), 2: moved(0.0)}, facts={1: skipped, 2: skipped}) == []


def test_updates_without_their_weights_in_the_step_are_not_judged():
    alone = {weight("w", "update"): [0.0]}
    assert findings_of({1: alone, 2: alone}) == []


def test_confirmation_can_be_asked_for_or_left_out():
    assert told(findings_of({1: {RELU: DEAD}}, Thresholds(confirm_observations=1))) == [("units_dead", 1, "relu")]
