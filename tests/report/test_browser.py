"""The page in a real browser: it opens without an error, answers, and is readable without scripts."""

import json
import os

import pytest

from aggregator.history import open_history
from tests.report.browser import CHROMIUM, PHONE, Browser
from tests.report.runs import WRITERS

SHAPES = "JSON.stringify(document.getElementById('%s').data.map((t) => [t.x, t.y, t.name]))"

if CHROMIUM is None and not os.environ.get("REQUIRE_BROWSER"):
    pytest.skip("needs chromium", allow_module_level=True)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    one = Browser(tmp_path_factory.mktemp("profile"))
    yield one
    one.close()


@pytest.fixture
def troubled(browser, page_of_run):
    browser.open(page_of_run("troubled"))
    return browser


@pytest.mark.parametrize("name", [writer.__name__ for writer in WRITERS])
def test_it_opens_without_an_error_and_without_a_network(browser, page_of_run, name):
    browser.open(page_of_run(name))
    assert browser.problems() == []
    assert browser.value("document.querySelector('.problem')") is None
    assert browser.value("[...document.querySelectorAll('.chart')].every((c) => c.querySelector('svg.main-svg'))")


def shown(browser, trace=0):
    """Return names of rows, and the numbers that hovering shows, of the heat map."""
    read = f"(() => {{ const t = document.getElementById('heatmap').data[{trace}];"
    return json.loads(
        browser.value(read + " return JSON.stringify([t.y, t.customdata.map((r) => Array.from(r))]); })()")
    )


def test_a_choice_of_kind_and_field_draws_the_numbers_of_the_record(troubled, run_of):
    history = open_history(run_of("troubled"))
    for kind, field in (
        ("gradient", "absmax"),
        ("activation", "mean"),
        ("update", "update_to_weight"),
        ("parameter", "nonfinite"),
    ):
        troubled.choose("heat-kind", kind)
        troubled.choose("heat-field", field)
        colour_bar = f"document.getElementById('heatmap').data[0].hovertemplate.includes('>{field} ')"
        title = f"document.getElementById('heatmap').data[0].y.length === 7 && {colour_bar}"
        troubled.wait_until(title)
        names, values = shown(troubled)
        if field == "nonfinite":
            assert sum(value for row in values for value in row) == 0
            continue
        expected = history.series(names[2], kind, field)["value"].to_pylist()
        for number, wanted in zip(values[2], expected, strict=True):
            assert number is None if wanted is None else number == pytest.approx(wanted, rel=2e-4)
    assert troubled.problems() == []


def test_missing_zero_and_nan_look_different_and_say_what_they_are(troubled):
    names, words = shown(troubled, trace=1)
    cells = {name: [word for word in row if word] for name, row in zip(names, words, strict=True)}
    some, none = cells["layers.0.attention.qkv"]
    assert some.startswith("some elements NaN or ±inf<br>rms of the finite ones: ")
    assert none == "no element finite"
    assert cells["layers.0.mlp"] == ["missing: scheduled, not observed"]
    assert cells["layers.10.attention.qkv"] == ["no elements"]
    assert cells["layers.10.mlp"] == ["exactly zero"] * 2
    codes = troubled.value(
        "new Set(document.getElementById('heatmap').data[1].z.flat().filter((c) => c !== null)).size"
    )
    assert codes == 5


def test_histograms_profile_and_ratio_follow_their_controls(troubled):
    def state(chart):
        return troubled.value(SHAPES % chart)

    for chart, control, option in (
        ("ridges", "ridge-site", "layers.0.attention.qkv"),
        ("ridges", "ridge-kind", "gradient"),
        ("profile", "depth-step", "3"),
        ("profile", "depth-field", "absmax"),
        ("ratio", "ratio-site", "head"),
    ):
        before = state(chart)
        assert troubled.choose(control, option) == option
        troubled.wait_until(f"{SHAPES % chart} !== {json.dumps(before)}")
    assert troubled.value("document.getElementById('depth-out').textContent") == "step 15"
    assert troubled.problems() == []


def test_the_shares_beside_a_histogram_are_those_of_the_record(troubled):
    troubled.choose("ridge-site", "layers.0.attention.qkv")
    table = "document.getElementById('ridges').data.at(-1)"
    troubled.wait_until(f"{table}.text.some((row) => row.some((share) => share !== '0'))")
    row = troubled.value(f"{table}.text[{table}.customdata.findIndex((row) => row[0] === 20)]")
    assert row == ["0", "0", "0", "4.69 %", "1.56 %"]


def test_a_cell_that_is_chosen_shows_its_histograms(troubled):
    troubled.value("document.getElementById('heatmap').emit('plotly_click', {points: [{y: 'layers.0.mlp'}]})")
    troubled.wait_until("document.getElementById('ridge-site').value === 'layers.0.mlp'")


def test_the_theme_is_the_systems_until_one_is_chosen(browser, page_of_run):
    paper = "getComputedStyle(document.body).backgroundColor"
    ink = "document.getElementById('heatmap')._fullLayout.font.color"
    browser.open(page_of_run("healthy"), dark=True)
    dark = browser.value(paper), browser.value(ink)
    browser.open(page_of_run("healthy"))
    light = browser.value(paper), browser.value(ink)
    assert dark[0] != light[0]
    assert dark[1] != light[1]
    browser.value("document.getElementById('theme').click()")
    browser.value("document.getElementById('theme').click()")
    browser.wait_until(f"{paper} === {json.dumps(dark[0])} && {ink} === {json.dumps(dark[1])}")
    assert browser.value("document.getElementById('theme').textContent") == "theme: dark"


@pytest.mark.parametrize("name", ["healthy", "troubled"])
def test_on_a_phone_nothing_is_wider_than_the_screen(browser, page_of_run, name):
    browser.open(page_of_run(name), size=PHONE)
    assert browser.value("document.documentElement.scrollWidth") <= PHONE[0]
    assert browser.problems() == []


def test_without_scripts_every_chart_is_a_picture_and_no_control_is_shown(browser, page_of_run):
    browser.open(page_of_run("troubled"), scripts=False, dark=True)
    document = browser.call("DOM.getDocument")["root"]["nodeId"]

    def boxes(selector):
        nodes = browser.call("DOM.querySelectorAll", nodeId=document, selector=selector)["nodeIds"]
        return [browser.call("DOM.getBoxModel", nodeId=node)["model"] for node in nodes]

    pictures = boxes(".chart img")
    assert len(pictures) == 6
    assert all(picture["height"] > 100 for picture in pictures)
    controls = browser.call("DOM.querySelectorAll", nodeId=document, selector=".controls")["nodeIds"]
    styles = [browser.call("CSS.getComputedStyleForNode", nodeId=node)["computedStyle"] for node in controls]
    assert all({"name": "display", "value": "none"} in style for style in styles)


def test_where_charts_cannot_be_drawn_the_page_says_so_and_keeps_its_pictures(browser, page_of_run, tmp_path):
    page = page_of_run("healthy").read_text().replace("new DecompressionStream", "new NoSuchStream")
    (tmp_path / "old.html").write_text(page)
    browser.open(tmp_path / "old.html")
    assert "cannot be drawn here" in browser.value("document.querySelector('.problem').textContent")
    assert browser.value("document.querySelectorAll('.chart img').length") == 6
