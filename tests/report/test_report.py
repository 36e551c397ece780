"""The files that a report is: whole, self-contained, small, and true for every kind of run."""

import io
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from aggregator.report import plots, render_png, static_plots, write_report
from aggregator.report.colours import MARKS
from aggregator.report.contents import read_contents
from aggregator.report.pictures import embedded_png, pictures_of
from telemetry.errors import FieldUnknownError, HistogramAbsentError, HistoryNotFoundError, ReportUnavailableError
from tests.report.runs import WRITERS

NAMES = [writer.__name__ for writer in WRITERS]
IN_ORDER = ["Findings", "Layers over time", "Over the depth of the model", "Histograms over time", "Update to weight",
            "Ranks and replicas", "What observing cost"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_report_has_its_parts_in_order_asks_nothing_of_a_network_and_is_small(page_of_run, name):
    page = page_of_run(name).read_text()
    assert re.findall(r"<h2[^>]*>([^<]*)</h2>", page) == IN_ORDER
    without_library = re.sub(r'<script type="application/octet-stream".*?</script>', "", page, flags=re.DOTALL)
    assert re.findall(r'(?:src|srcset|href)="(?!#|data:).{1,40}|url\((?!data:).{1,40}|@import', without_library) == []
    assert len(page.encode()) < 3_000_000
    json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_findings_stand_before_all_charts_with_their_evidence(page_of_run):
    page = page_of_run("troubled").read_text()
    body = page[: page.index('id="over-time"')]
    expected = (
        *("nonfinite_values", "activation layers.0.attention.qkv", "3 NaN, 1 +inf of 64 elements", "20 to 25, 2 times"),
        *("replica_disagreement", "30 to 40, 3 times", "<svg"),
    )
    for text in expected:
        assert text in body
    assert "No findings" in page_of_run("healthy").read_text()


def test_what_a_run_does_not_have_is_said(page_of_run):
    assert "The run has no histograms" in page_of_run("without_histograms").read_text()
    assert "did not observe both updates and parameters" in page_of_run("call_sites_only").read_text()
    empty = page_of_run("without_steps").read_text()
    assert "no step was committed" in empty.lower()
    assert "Nothing was observed." in empty


def test_text_of_the_run_is_text_on_the_page(page_of_run):
    page = page_of_run("troubled").read_text()
    assert "&lt;b&gt;RuntimeError&lt;/b&gt;: out of memory &amp; more" in page
    assert "<b>RuntimeError" not in page


def test_superseded_attempts_are_listed(page_of_run):
    page = page_of_run("troubled").read_text()
    assert "from step 10" in page
    assert "<h3>Segments</h3>" not in page_of_run("healthy").read_text()


def test_a_long_run_says_that_its_columns_hold_several_steps(run_of, tmp_path, monkeypatch):
    monkeypatch.setattr("aggregator.report.contents.MAX_COLUMNS", 6)
    monkeypatch.setattr("aggregator.report.contents._MIN_COLUMNS", 6)
    monkeypatch.setattr("aggregator.report.contents.MAX_RIDGES", 3)
    page = write_report(run_of("healthy"), tmp_path / "r.html").read_text()
    assert "over 10 steps, merged exactly as ranks are: 12 recorded steps" in page
    assert "Shown are 3 of the 6 steps that have histograms" in page


def test_the_same_record_makes_the_same_page(run_of, page_of_run, tmp_path):
    again = write_report(run_of("call_sites_only"), tmp_path / "again.html")
    assert again.read_bytes() == page_of_run("call_sites_only").read_bytes()


def test_a_report_appears_whole_or_not_at_all(run_of, tmp_path, monkeypatch):
    target = tmp_path / "report.html"
    target.write_text("before")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_report(run_of("call_sites_only"), target)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert target.read_text() == "before"


def test_title_and_progress_are_the_callers(run_of, tmp_path):
    told = []
    page = write_report(
        run_of("call_sites_only"), tmp_path / "r.html", title="A & B", progress=lambda *done: told.append(done)
    )
    assert "<h1>A &amp; B</h1>" in page.read_text()
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_wrong_input_is_refused_before_anything_is_written(run_of, tmp_path):
    with pytest.raises(FieldUnknownError, match="near it: rms"):
        write_report(run_of("healthy"), tmp_path / "r.html", field="rmss")
    with pytest.raises(HistoryNotFoundError):
        write_report(tmp_path / "nowhere", tmp_path / "r.html")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_library_is_named_with_the_command(monkeypatch, run_of, tmp_path):
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ReportUnavailableError, match=r"plotly") as caught:
        write_report(run_of("healthy"), tmp_path / "r.html")
    assert "pip install 'rankfold[report]'" in caught.value.remedy


def test_importing_the_report_loads_no_library_that_draws():
    program = (
        "import sys, torch; before = set(sys.modules); import aggregator.report.plots, aggregator.report.static_plots;"
    )
    program += (
        "print({n.partition('.')[0] for n in set(sys.modules) - before} & {'plotly', 'matplotlib', 'PIL', 'jinja2'})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "set()\n"


def test_pictures_are_written_for_what_the_run_has(run_of, tmp_path):
    written = [path.name for path in render_png(run_of("healthy"), tmp_path / "png", dark=True)]
    assert written == [f"{name}.png" for name in ("heatmap", "profile", "ridges", "ratio", "coverage", "cost")]
    for name in written:
        size = Image.open(tmp_path / "png" / name).size
        assert size[0] == 960
    assert render_png(run_of("without_steps"), tmp_path / "none") == []


@pytest.mark.parametrize("dark", [False, True])
def test_every_state_has_its_own_colour_in_the_picture(history_of, dark):
    picture = pictures_of(read_contents(history_of("troubled"), "rms"))["heatmap"]
    pixels = (
        np.array(Image.open(io.BytesIO(embedded_png(picture.draw(dark)))).convert("RGB")).reshape(-1, 3).astype(int)
    )
    for mark in MARKS:
        colour = [int(mark.colour[i : i + 2], 16) for i in (1, 3, 5)]
        near = (np.abs(pixels - colour).max(1) <= 1).sum()
        assert near > 300, mark.word


FIGURES = {
    "heatmap": {"kind": "gradient", "field": "mean"},
    "depth_profile": {"field": "absmax"},
    "histogram_ridgeline": {"site": "head"},
    "update_to_weight": {"site": "head"},
    "coverage": {},
    "cost": {},
}


@pytest.mark.parametrize("module", [plots, static_plots], ids=["plotly", "matplotlib"])
@pytest.mark.parametrize("name", FIGURES)
def test_notebooks_get_a_figure_from_either_library(history_of, module, name):
    assert {*FIGURES, *(f"draw_{name}" for name in FIGURES)} == set(module.__all__)
    figure = getattr(module, name)(history_of("troubled"), **FIGURES[name])
    assert type(figure).__module__.startswith(("plotly.", "matplotlib."))


def test_the_figure_holds_the_numbers_of_the_record(history_of):
    history = history_of("healthy")
    figure = plots.heatmap(history, kind="gradient", field="absmax")
    names = list(figure.data[0].y)
    expected = history.series("head", "gradient", "absmax")["value"].to_pylist()
    assert figure.data[0].customdata[names.index("head")].tolist() == expected
    with pytest.raises(HistogramAbsentError):
        plots.histogram_ridgeline(history_of("without_histograms"), "head")
