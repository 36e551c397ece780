"""What the report computes from a run."""

import pyarrow as pa

from launch.run_report import Movement, most_moved, non_finite_line, own_time_line


def test_the_sites_that_moved_most_come_first():
    series = [("flat", [1.0, 1.0]), ("fourfold", [2.0, 0.5, 1.0]), ("twofold", [1.0, 2.0])]
    assert [moved.site for moved in most_moved(series)] == ["fourfold", "twofold", "flat"]
    assert most_moved(series, 1) == [Movement("fourfold", 0.5, 2.0)]


def test_a_site_without_values_is_left_out_and_one_value_has_not_moved():
    assert [(moved.site, moved.ratio) for moved in most_moved([("none", []), ("one", [3.0])])] == [("one", 1.0)]


def test_a_gradient_that_starts_at_zero_moved_without_bound_and_one_that_stays_there_did_not():
    assert Movement("woke", 0.0, 1e-3).ratio == float("inf")
    assert Movement("dead", 0.0, 0.0).ratio == 1.0


def test_the_first_non_finite_observation_is_named_and_an_absent_one_is_not_counted():
    table = pa.table(
        {
            "step": [1, 5, 3, 3],
            "site": ["a", "late", "absent", "early"],
            "kind": ["gradient"] * 4,
            "nan": [0, 7, None, 0],
            "pos_inf": [0, 0, None, 0],
            "neg_inf": [0, 0, None, 1],
        }
    )
    expected = "Non-finite values: in 2 of 4 observations, first in gradient early at step 3."
    assert non_finite_line(table) == expected
    assert non_finite_line(table.slice(0, 1)) == "Non-finite values: none in 1 observations."


def test_the_own_share_is_over_all_recorded_steps_together():
    steps = pa.table({"self_s": [0.1, 0.3], "step_s": [1.0, 1.0]})
    assert own_time_line(steps) == "Own share of the time of the 2 recorded steps: 20.0 %."
    assert "unknown" in own_time_line(steps.slice(0, 0))
