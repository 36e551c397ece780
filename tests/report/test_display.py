"""From numbers to what is drawn: nothing that is drawn says another thing than the number."""

import base64
import gzip
import json

import numpy as np
import pytest
import torch

from aggregator.history import open_history
from aggregator.report.payload import packed_floats, script_json
from aggregator.report.ridges import BANDS, evenly_chosen, histogram_steps, read_one_ridges, read_ridges, shown_share
from aggregator.report.scale import field_label, scale_of, shown_number
from aggregator.report.spark import sparkline
from aggregator.testing import make_packet, make_site
from telemetry.errors import HistogramAbsentError
from telemetry.summary import DEFAULT_DESCRIPTOR, SUMMARY_FIELDS, HistogramDescriptor, summarize
from tests.report.runs import write


def unpacked(text):
    planes = np.frombuffer(gzip.decompress(base64.b64decode(text)), np.uint8).reshape(4, -1)
    return np.ascontiguousarray(planes.T).view("<f4").ravel()


def test_packed_numbers_keep_four_digits_and_what_is_no_number():
    draw = np.random.default_rng(0)
    values = draw.normal(size=5000) * 10.0 ** draw.integers(-36, 36, 5000)
    found = unpacked(packed_floats(values)).astype(np.float64)
    assert np.max(np.abs(found / values - 1)) <= 2.0**-14 + 2.0**-24
    special = np.array([np.nan, np.inf, -np.inf, 0.0, 1e300, 1.0, -2.0])
    assert np.array_equal(unpacked(packed_floats(special)), [np.nan, np.inf, -np.inf, 0, np.inf, 1, -2], equal_nan=True)


def test_json_cannot_end_the_script_it_stands_in_and_holds_no_nan():
    text = script_json({"name": "</script><!--"})
    assert "<" not in text
    assert json.loads(text) == {"name": "</script><!--"}
    with pytest.raises(ValueError):
        script_json([float("nan")])


@pytest.mark.parametrize("field", SUMMARY_FIELDS)
@pytest.mark.parametrize(
    "values", [[1e-9, 1.0, 1e5], [-3.0, 0.0, 2.0], [0.0, 0.0], [5.0, 5.0], [np.nan], [1e-300, 1e300]]
)
def test_every_field_has_a_scale_with_ticks_in_order_on_which_values_lie(field, values):
    values = np.abs(values) if scale_of(field, np.array([1.0])).kind != "symlog" else np.array(values)
    scale = scale_of(field, values)
    places = [place for place, _ in scale.ticks]
    assert scale.low < scale.high
    assert len(places) >= 2
    assert places == sorted(places)
    shown = scale.transform(values)
    inside = (shown >= scale.low - 1e-9) & (shown <= scale.high + 1e-9)
    assert scale.kind == "linear" or (inside | np.isnan(shown)).all()
    assert field in field_label(field)


def test_scales_keep_order_and_sign():
    signed = scale_of("mean", np.array([-10.0, -1e-3, 0.0, 1e-3, 10.0]))
    shown = signed.transform(np.array([-10.0, -1e-3, 0.0, 1e-3, 10.0]))
    assert (np.diff(shown) > 0).all()
    assert shown[2] == 0
    assert np.allclose(shown, -shown[::-1])
    assert np.isnan(scale_of("rms", np.array([1.0])).transform(np.array([0.0]))).all()


def test_numbers_are_told_as_people_read_them():
    assert [shown_number(value) for value in (None, float("nan"), 0.0, 12345.0, 0.123456)] == [
        "–",
        "–",
        "0",
        "12,345",
        "0.1235",
    ]
    assert [shown_share(share) for share in (0.0, 1e-9, 0.25, 1.0)] == ["0", "<0.01 %", "25 %", "100 %"]


SPECIAL = torch.tensor([0.0, 0.0, 1e-20, -1e-20, 1e6, float("nan"), float("inf"), -float("inf"), 1.0, -1.0, 2.0, 3.0])


@pytest.mark.parametrize("descriptor", [DEFAULT_DESCRIPTOR, HistogramDescriptor(bins_per_octave=1)])
def test_a_ridgeline_accounts_for_every_element(tmp_path, monkeypatch, descriptor):
    site = make_site("a")
    packets = [make_packet(0, {site: summarize(SPECIAL, histogram=descriptor)}, descriptor=descriptor)]
    monkeypatch.setattr("tests.report.runs.DEFAULT_DESCRIPTOR", descriptor)
    ridges = read_one_ridges(open_history(write(tmp_path / "run", packets)), "a", "activation")
    assert dict(zip(BANDS, (12 * ridges.shares[0]).round(9).tolist(), strict=True)) == {
        "zero": 2, "underflow": 2, "overflow": 1, "NaN": 1, "±inf": 2,
    }  # fmt: skip
    # -1 | 1 | 2 and 3: with two bins to an octave the last are two bins, with one bin they are one.
    heights = ridges.heights[0]
    positive, negative = heights[ridges.x > 0], heights[ridges.x < 0]
    assert np.count_nonzero(negative) == 1
    assert np.count_nonzero(positive) == (3 if descriptor is DEFAULT_DESCRIPTOR else 2)
    assert heights.max() == 1.0
    assert np.allclose(ridges.x, -ridges.x[::-1])


def test_ridges_of_all_sites_are_those_of_each(history_of):
    history = history_of("healthy")
    assert histogram_steps(history) == [0, 10, 20, 30, 40, 50]
    for one in read_ridges(history, [0, 20])[::7]:
        expected = history.histogram(one.site, one.kind, 20)
        shares = one.shares[1] * expected.total
        assert shares[0] == expected.counts[expected.descriptor.zero_index]
        assert one.steps.tolist() == [0, 20]


def test_steps_are_chosen_evenly_with_both_ends():
    assert evenly_chosen([1, 5, 9], 12) == [1, 5, 9]
    chosen = evenly_chosen(list(range(100)), 12)
    assert len(chosen) == 12
    assert (chosen[0], chosen[-1]) == (0, 99)


def test_a_site_without_histograms_says_so(history_of):
    with pytest.raises(HistogramAbsentError):
        read_one_ridges(history_of("without_histograms"), "head", "activation")


def test_a_small_line_has_gaps_where_there_is_no_number():
    line = sparkline([(0, 1.0), (1, 2.0), (2, None), (3, 0.0), (4, 3.0), (5, 4.0)], [2], "rms")
    assert line.count("M") == 2 + 1
    assert line.count("L") == 2
    assert sparkline([(0, 1.0)], [], "rms") == ""
