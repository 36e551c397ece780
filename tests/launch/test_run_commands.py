"""Every command that looks at runs, on runs in every state: a clear answer, and the documented exit code."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from dataclasses import replace
from functools import cache

import numpy as np
import pyarrow.feather
import pyarrow.parquet
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from aggregator import open_history
from aggregator.history import HistoryWriter
from aggregator.sinks import JsonlSink, RunInfo
from launch.cli import run
from launch.lazy import LAZY_COMMANDS
from telemetry.summary import DEFAULT_DESCRIPTOR
from tests.launch.runs import RECORD, STATES, STEPS, make_packets, make_run, make_steps, write_steps
from tests.sinks.trackers import wandb_rows

COMMANDS = {
    "inspect": ["inspect", "RUN"],
    "series": ["series", "RUN", "layers.0", "rms"],
    "top": ["top", "RUN"],
    "watch": ["watch", "RUN", "--wait", "0"],
    "compare": ["compare", "RUN", "RUN"],
    "export": ["export", "RUN", "--to", "csv", "-o", "OUT"],
    "verify": ["verify", "RUN"],
    "report": ["report", "RUN", "-o", "OUT"],
}
NO_RUN = {"empty", "foreign", "missing"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a function from a state to a run in it, made once: no command writes into a run."""
    folder = tmp_path_factory.mktemp("runs")
    return cache(lambda state: make_run(folder / state, state))


def call(words, path, capsys, *options, out="out"):
    """Run a command on ``path``; returns exit code, standard output and standard error."""
    places = {"RUN": str(path), "OUT": str(out)}
    code = run([*(places.get(word, word) for word in words), *options])
    return code, *capsys.readouterr()


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_answers_for_a_run_in_every_state(command, state, runs, tmp_path, capsys, monkeypatch):
    path = runs(state)
    if command == "watch" and state == "growing":
        # It would follow such a run for good: somebody presses Ctrl-C.
        monkeypatch.setattr("launch.commands.watch.time.sleep", _interrupt)
    code, out, err = call(COMMANDS[command], path, capsys, out=tmp_path / "out")
    assert "Traceback" not in err
    if state in NO_RUN:
        assert (code, out) == (1, "")
        assert str(path) in err
        assert "→" in err
        assert not (tmp_path / "out").exists()
    elif state == "damaged" and command == "verify":
        assert code == 3
        assert "seg-00000" in out
    elif state == "damaged":
        assert code == 1
        assert "[history_damaged]" in err
        assert "salvage" in err
    else:
        assert code == 0, err
        assert out or command == "export"


def _interrupt(seconds):
    raise KeyboardInterrupt


@pytest.mark.parametrize("command", ["inspect", "series", "top", "compare", "export"])
def test_salvage_reads_what_is_left_and_says_what_is_not(runs, command, tmp_path, capsys):
    path = runs("damaged")
    code, _, err = call(COMMANDS[command], path, capsys, "--salvage", out=tmp_path / "out")
    assert code == 0
    assert "left out: " in err
    assert "steps 3 to 3" in err


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("state", ["whole", "superseded"])
def test_json_is_one_strict_value_or_one_a_line(runs, command, state, tmp_path, capsys):
    path = runs(state)
    code, out, _ = call(COMMANDS[command], path, capsys, "--json", out=tmp_path / "out")
    assert code == 0

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    values = [json.loads(line, parse_constant=refuse) for line in out.splitlines()]
    assert len(values) == (len(open_history(path).steps()) if command == "watch" else 1)


# ls


def test_ls_tells_the_state_of_every_run_and_does_not_look_into_runs(tmp_path, capsys):
    for state in ("whole", "growing", "superseded", "damaged", "foreign"):
        make_run(tmp_path / state, state)
    (tmp_path / "whole" / "tb").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manifest.json").write_text("{")
    assert run(["ls", str(tmp_path), "--json"]) == 0
    found = {row["path"].rpartition("/")[2]: row for row in json.loads(capsys.readouterr().out)}
    assert {name: row["state"] for name, row in found.items()} == {
        "whole": "closed",
        "growing": "open",
        "superseded": "closed",
        "damaged": "closed",
        "broken": "unreadable",
    }
    assert (found["superseded"]["num_segments"], found["superseded"]["num_steps"]) == (2, 9)
    assert (found["whole"]["last_step"], found["whole"]["world_size"], found["whole"]["model"]) == (8, 2, "Net")
    assert "history_damaged" in found["broken"]["problem"]
    assert run(["ls", str(tmp_path)]) == 0


def test_ls_of_no_folder_says_so_and_of_an_empty_one_too(tmp_path, capsys):
    assert run(["ls", str(tmp_path / "nowhere")]) == 1
    assert "is not a folder" in capsys.readouterr().err
    assert run(["ls", str(tmp_path)]) == 0
    assert "there are no runs" in capsys.readouterr().out


# inspect


def test_inspect_counts_steps_segments_presences_findings_and_cost(runs, tmp_path, capsys):
    path = runs("superseded")
    _, out, _ = call(COMMANDS["inspect"], path, capsys, "--json")
    found = json.loads(out)
    assert found["steps"] == {"num_steps": 9, "first": 1, "last": 9, "num_superseded": 4, "num_skipped": 0,
                              "modes": {"train": 9}}  # fmt: skip
    assert [segment["resume_step"] for segment in found["segments"]] == [None, 5]
    assert found["sites"] == {"activation": 2, "gradient": 2, "parameter": 1, "update": 1}
    assert found["presence"]["activation"] == {"observed": 17, "site_absent": 1}
    assert found["findings"][0]["code"] == "nonfinite_first_seen"
    assert found["cost"]["own_share"] == pytest.approx(0.02)
    _, text, _ = call(COMMANDS["inspect"], path, capsys)
    for word in ("Net on 2 ranks", "dp 2", "4 superseded", "nonfinite_first_seen", "2.0%"):
        assert word in text


# series


def series_of(capsys, path, *words):
    assert run(["series", str(path), *words, "--json"]) == 0
    return {(row["kind"], row["site"]): row for row in json.loads(capsys.readouterr().out)}


def test_series_shows_every_site_that_a_glob_means(runs, tmp_path, capsys):
    path = runs("whole")
    found = series_of(capsys, path, "layers.*", "absmax")
    weights = [(kind, "layers.0.weight") for kind in ("gradient", "parameter", "update")]
    assert set(found) == {("activation", "layers.0"), *weights, ("activation", "layers.1")}
    assert found["activation", "layers.0"]["step"] == list(STEPS)
    assert found["activation", "layers.0"]["value"] == [3.0, 6.0, None, 12.0, 15.0, 18.0, 21.0, 24.0]
    only = series_of(capsys, path, "layers.*", "absmax", "-k", "gradient")
    assert list(only) == [("gradient", "layers.0.weight")]


def test_series_knows_the_update_to_weight_ratio(runs, tmp_path, capsys):
    path = runs("whole")
    found = series_of(capsys, path, "layers.*", "update_to_weight")
    assert found["update", "layers.0.weight"]["value"] == pytest.approx([0.01] * 8)


def test_series_shows_the_newest_attempt_of_a_step(runs, tmp_path, capsys):
    path = runs("superseded")
    (row,) = series_of(capsys, path, "layers.0", "absmax").values()
    assert row["value"] == [3.0, 6.0, None, 12.0, 30.0, 36.0, 42.0, 48.0, 54.0]


def test_series_becomes_a_table_in_every_format(runs, tmp_path, capsys):
    path = runs("whole")
    assert run(["series", str(path), "layers.0*", "nan", "-f", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 4 * len(STEPS)
    assert rows[0] == {"step": "1", "kind": "activation", "site": "layers.0", "value": "0"}
    for suffix, read in (("parquet", pyarrow.parquet.read_table), ("arrow", pyarrow.feather.read_table)):
        file = tmp_path / "made" / f"series.{suffix}"
        assert run(["series", str(path), "layers.0*", "rms", "-f", suffix, "-o", str(file)]) == 0
        assert read(str(file)).column_names == ["step", "kind", "site", "value"]


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (["layers.2"], 1, "layers.1"),
        (["layer?.9"], 1, "site_unknown"),
        (["layers.0", "rsm"], 1, "rms"),
        (["layers.0", "rms", "-k", "gradients"], 1, "gradient"),
        (["layers.0", "rms", "-o", "x.csv"], 2, "--format"),
        (["layers.0", "rms", "-f", "parquet"], 2, "--output"),
        (["layers.0", "rms", "-f", "xlsx"], 2, "parquet"),
    ],
)
def test_series_says_what_was_meant_perhaps(runs, words, code, hint, tmp_path, capsys):
    path = runs("whole")
    assert run(["series", str(path), *words]) == code
    assert hint in capsys.readouterr().err


# top


def test_top_finds_what_moved_what_is_dead_and_what_is_not_finite(runs, tmp_path, capsys):
    path = runs("whole")
    assert run(["top", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["kind"], row["site"], row["at_step"]) for row in found["dead"]] == [("activation", "layers.1", 8)]
    (sick,) = found["nonfinite"]
    assert sick == {"kind": "gradient", "site": "head.bias", "first_step": 5, "first_rank": 0, "num_ranks": 1,
                    "num_steps": 4, "num_elements": 4}  # fmt: skip
    ratios = {row["site"]: row["ratio"] for row in found["moved"] if row["kind"] == "activation"}
    assert ratios["layers.0"] == pytest.approx(8.0)
    assert found["updates"] == [{"site": "layers.0.weight", "update_to_weight": pytest.approx(0.01), "at_step": 8}]
    assert found["ranks"][0]["first_nonfinite"] == 4
    assert run(["top", str(path), "--last", "2", "-k", "activation", "--json"]) == 0
    last = json.loads(capsys.readouterr().out)
    assert last["steps"] == [7, 8]
    assert last["nonfinite"] == []
    assert {row["site"]: row["ratio"] for row in last["moved"]}["layers.0"] == pytest.approx(8 / 7)


# watch


def test_watch_follows_until_the_run_is_closed(tmp_path, capsys, monkeypatch):
    writer = write_steps(tmp_path / "run", range(1, 4), close=False)
    waits = []

    def go_on(seconds):
        waits.append(seconds)
        step = 3 + len(waits)
        (merged,) = make_steps(make_packets([step]))
        writer.commit(merged)
        if len(waits) == 3:
            writer.close()

    monkeypatch.setattr("launch.commands.watch.time.sleep", go_on)
    assert run(["watch", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert [line.split()[1] for line in out.splitlines() if line.startswith("step")] == [str(s) for s in range(1, 7)]
    assert "finding nonfinite_first_seen" in out


def test_watch_waits_for_a_run_and_ends_with_the_interrupt(tmp_path, capsys, monkeypatch):
    def happen(seconds):
        if (tmp_path / "run").exists():
            raise KeyboardInterrupt
        write_steps(tmp_path / "run", range(1, 3), close=False)

    monkeypatch.setattr("launch.commands.watch.time.sleep", happen)
    assert run(["watch", str(tmp_path / "run"), "--json"]) == 0
    assert [json.loads(line)["step"] for line in capsys.readouterr().out.splitlines()] == [1, 2]


# compare


def test_compare_names_the_first_step_and_site_that_differ(tmp_path, capsys):
    write_steps(tmp_path / "a")
    writer = write_steps(tmp_path / "b", range(1, 4), close=False)
    for step in make_steps(make_packets(range(4, 9), factor=1.001)):
        writer.commit(step)
    writer.close()
    pair = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert run(["compare", *pair]) == 3
    text = capsys.readouterr().out
    assert "the first ones at step 4" in text
    assert run(["compare", *pair, "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert (found["first_step"], found["num_rows"], found["num_different"]) == (4, 6 * 8, 4 * 5)
    assert {row["site"] for row in found["differences"]} == {"layers.0", "layers.0.weight"}
    assert found["largest"]["sum"]["relative"] == pytest.approx(0.001, rel=0.01)
    # A tolerance is for floats; no bin and no count moved here.
    assert run(["compare", *pair, "--rtol", "0.01"]) == 0
    assert run(["compare", *pair, "-k", "parameter"]) == 3


def test_compare_counts_what_one_run_alone_has(tmp_path, capsys):
    write_steps(tmp_path / "a")
    write_steps(tmp_path / "b", range(3, 11))
    assert run(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert (found["num_steps"], found["steps_left"], found["steps_right"], found["num_different"]) == (6, 2, 2, 0)


def test_compare_sees_a_count_and_a_presence_that_differ(tmp_path, capsys):
    write_steps(tmp_path / "a", range(2, 4))
    write_steps(tmp_path / "b", range(2, 3))
    # Step 3 of another loop, in which the module ran.
    path = tmp_path / "b2"
    writer = write_steps(path, range(2, 3), close=False)
    packet = next(iter(make_packets([4])))
    (merged,) = make_steps([replace(packet, step=3)])
    writer.commit(merged)
    writer.close()
    assert run(["compare", str(tmp_path / "a"), str(path), "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    fields = {(row["site"], row["field"]) for row in found["differences"] if row["kind"] == "activation"}
    assert ("layers.0", "presence") in fields


# export


def test_an_exported_record_is_what_the_sink_wrote_in_the_run(runs, tmp_path, capsys):
    path = runs("whole")
    live = JsonlSink(tmp_path / "live.jsonl")
    live.open(RunInfo(open_history(path).run_id, 0, None, 2, DEFAULT_DESCRIPTOR, RECORD))
    for step in make_steps(make_packets(STEPS)):
        live.emit(step)
    live.close()
    assert run(["export", str(path), "--to", "jsonl", "-o", str(tmp_path / "after.jsonl")]) == 0
    texts = [(tmp_path / name).read_text().splitlines() for name in ("live.jsonl", "after.jsonl")]
    live_lines, after_lines = ([json.loads(line) for line in lines] for lines in texts)
    assert len(live_lines) == len(after_lines)
    assert live_lines[1:-1] == after_lines[1:-1]


def test_tensorboard_gets_every_step_and_every_count(runs, tmp_path):
    path = runs("whole")
    assert run(["export", str(path), "--to", "tensorboard", "-o", str(tmp_path / "tb")]) == 0
    events = EventAccumulator(str(tmp_path / "tb"), size_guidance={"tensors": 0, "scalars": 0, "histograms": 0})
    events.Reload()
    gradient = ("gradient", "layers.0.weight")
    (absmax,) = (tag for tag in events.Tags()["scalars"] if all(word in tag for word in (*gradient, "absmax")))
    shown = [(event.step, event.value) for event in events.Scalars(absmax)]
    series = open_history(path).series("layers.0.weight", "gradient", "absmax")
    stored = zip(series["step"].to_pylist(), np.float32(series["value"].to_numpy()).tolist(), strict=True)
    assert shown == list(stored)
    (histogram,) = (tag for tag in events.Tags()["histograms"] if all(word in tag for word in gradient))
    assert [(event.step, sum(event.histogram_value.bucket)) for event in events.Histograms(histogram)] == [
        (step, 4) for step in STEPS if step % 2 == 0
    ]


def test_two_counts_that_one_float_stands_for_are_told_apart(tmp_path, capsys):
    packet = next(iter(make_packets([2])))
    for name, count in (("a", 2**60), ("b", 2**60 + 1)):
        ints = packet.ints.copy()
        ints[0, :2] = count
        (merged,) = make_steps([replace(packet, ints=ints)])
        writer = HistoryWriter.create(tmp_path / name, RECORD, DEFAULT_DESCRIPTOR)
        writer.commit(merged)
        writer.close()
    assert run(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 3
    assert "total" in capsys.readouterr().out


@pytest.mark.parametrize("to", ["parquet", "csv"])
def test_tables_hold_every_observation(runs, to, tmp_path, capsys):
    path = runs("superseded")
    file = tmp_path / f"rows.{to}"
    assert run(["export", str(path), "--to", to, "-o", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"to": to, "output": str(file), "rows": 6 * 9}
    table = pyarrow.parquet.read_table(file) if to == "parquet" else pyarrow.csv.read_csv(file)
    assert table.num_rows == 6 * 9
    assert ("hist_bins" in table.column_names) == (to == "parquet")
    assert table["absmax"].to_pylist() == open_history(path).observations()["absmax"].to_pylist()


def test_export_never_writes_over_what_is_there(runs, tmp_path, capsys):
    path = runs("whole")
    (tmp_path / "mine.csv").write_text("mine")
    assert run(["export", str(path), "--to", "csv", "-o", str(tmp_path / "mine.csv")]) == 1
    assert (tmp_path / "mine.csv").read_text() == "mine"
    assert run(["export", str(path), "--to", "jsonl", "-o", str(tmp_path / "x"), "--site", "a"]) == 2


# verify


def test_verify_finds_numbers_that_cannot_be_true(runs, tmp_path, capsys, monkeypatch):
    path = runs("whole")
    assert run(["verify", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"sound": True, "damage": [], "invariants": []}
    packet = next(iter(make_packets([2])))
    ints = packet.ints.copy()
    ints[0, 0] += 1
    (merged,) = make_steps([replace(packet, ints=ints)])
    writer = HistoryWriter.create(tmp_path / "odd", RECORD, DEFAULT_DESCRIPTOR)
    writer.commit(merged)
    writer.close()
    assert run(["verify", str(tmp_path / "odd"), "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["damage"] == []
    assert {row["step"] for row in found["invariants"]} == {2}
    assert "total is not finite + nan + pos_inf + neg_inf" in {row["problem"] for row in found["invariants"]}


def test_help_of_every_command_says_what_it_does(capsys):
    for command in ("ls", *COMMANDS):
        assert run([command, "--help"]) == 0
        assert "--json" in capsys.readouterr().out


def test_the_summary_of_a_command_is_the_first_line_of_its_help():
    assert {*LAZY_COMMANDS} == {"gate", "ls", "render", "run", "status", *COMMANDS}
    for name, command in LAZY_COMMANDS.items():
        assert command.load(name).help.splitlines()[0] == command.summary


def test_the_list_of_commands_comes_without_torch():
    code = "import sys; from launch.cli import run; assert run(['--help']) == 0; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines()[-1] == "False", done.stderr
    assert all(name in done.stdout for name in LAZY_COMMANDS)


def test_wandb_gets_an_offline_run_with_every_step(runs, tmp_path):
    path = runs("whole")
    assert run(["export", str(path), "--to", "wandb", "-o", str(tmp_path / "wb")]) == 0
    rows = wandb_rows(tmp_path / "wb")
    steps = [row["rankfold/step"] for row in rows if "rankfold/step" in row]
    assert sorted(set(steps)) == list(STEPS)
    assert any("layers.0.weight" in key for row in rows for key in row)
