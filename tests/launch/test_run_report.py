"""What the report computes from a run."""

from launch.run_report import Movement, most_moved


def test_the_sites_that_moved_most_come_first():
    series = [("flat", [1.0, 1.0]), ("fourfold", [2.0, 0.5, 1.0]), ("twofold", [1.0, 2.0])]
    assert [moved.site for moved in most_moved(series)] == ["fourfold", "twofold", "flat"]
    assert most_moved(series, 1) == [Movement("fourfold", 0.5, 2.0)]


def test_a_site_without_values_is_left_out_and_one_value_has_not_moved():
    assert [(moved.site, moved.ratio) for moved in most_moved([("none", []), ("one", [3.0])])] == [("one", 1.0)]


def test_a_gradient_that_starts_at_zero_moved_without_bound_and_one_that_stays_there_did_not():
    assert Movement("woke", 0.0, 1e-3).ratio == float("inf")
    assert Movement("dead", 0.0, 0.0).ratio == 1.0
