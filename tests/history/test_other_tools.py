"""pandas, Polars and DuckDB take our tables as the documentation says, with no number changed on the way."""

import re
from pathlib import Path

import pytest
import torch

from aggregator.history import FoldingPolicy, HistoryWriter, open_history
from aggregator.testing.packets import make_packet, make_site, make_steps
from telemetry.presence import Presence
from telemetry.summary import DEFAULT_DESCRIPTOR, summarize

duckdb = pytest.importorskip("duckdb")
polars = pytest.importorskip("polars")
pytest.importorskip("pandas")

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "history.md"
SITES = [make_site(f"layers.{i}", "gradient") for i in range(3)]
ABSENT = make_site("absent", "gradient")


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    path = tmp_path_factory.mktemp("tools") / "run"
    writer = HistoryWriter.create(path, {}, DEFAULT_DESCRIPTOR, folding=FoldingPolicy((4, 4)))
    unobserved = {ABSENT: (Presence.CAPTURE_FAILED, "RuntimeError")}
    packets = (
        make_packet(
            step,
            {site: summarize(torch.arange(5.0) * (i + step), histogram=True) for i, site in enumerate(SITES)},
            unobserved=unobserved,
        )
        for step in range(20)
    )
    for step in make_steps(packets):
        writer.commit(step)
    writer.close()
    return open_history(path)


def documented():
    """Return the documented lines that hand our tables on."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (lines,) = [block for block in blocks if "to_pandas" in block]
    return lines


def test_the_documented_lines_run_and_give_our_numbers(history):
    expected = {site.name: max(history.series(site.name, "gradient", "rms")["value"].to_pylist()) for site in SITES} | {
        ABSENT.name: None
    }
    scope = {"history": history, "duckdb": duckdb, "polars": polars}
    exec(compile(documented(), str(PAGE), "exec"), scope)
    pandas_rows = {site: None if value != value else value for site, value in scope["by_pandas"].items()}
    assert pandas_rows == expected
    assert {row["site"]: row["rms"] for row in scope["by_polars"].to_dicts()} == expected
    duckdb_rows = scope["by_duckdb"].to_pylist()
    assert {row["site"]: row["rms"] for row in duckdb_rows} == expected
    assert scope["counted"] == [(20 * (len(SITES) + 1),)]


@pytest.mark.parametrize("table", ["observations", "steps", "sites", "findings", "coverage", "segments"])
def test_every_table_of_ours_goes_into_every_tool_and_comes_back_the_same(history, table):
    rows = getattr(history, table)()
    expected = rows.to_pylist()
    assert polars.from_arrow(rows).to_arrow().to_pylist() == expected
    assert duckdb.sql("SELECT * FROM rows").to_arrow_table().to_pylist() == expected
    assert len(rows.to_pandas()) == rows.num_rows
