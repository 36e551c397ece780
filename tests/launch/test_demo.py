"""The demo, from the command line to the record: a real torchrun, real text, two ranks."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aggregator import open_history

pytestmark = pytest.mark.timeout(300)

RANKFOLD = str(Path(sys.executable).with_name("rankfold"))
DEADLINE_S = 200
WIDTH, HIDDEN, BATCH, CONTEXT, RANKS = 128, 512, 8, 128, 2


def rankfold_demo(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [RANKFOLD, "demo", "--out", str(out), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "run"
    done = rankfold_demo(out, "--steps", "6", "--every", "3", "--hist-every", "6")
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_the_demo_shows_plan_progress_report_and_table_in_this_order(finished):
    _, printed = finished
    shown = ("Rankfold plan", "step 6/6", "Rankfold report", "Gradient rms that moved most", "Non-finite values: none")
    assert [text in printed for text in shown] == [True] * len(shown), printed
    assert sorted(shown, key=printed.index) == list(shown)


def test_the_demo_records_all_five_signals_of_both_ranks_at_its_cadence(finished):
    history = open_history(finished[0])
    kinds = {row["kind"] for row in history.sites().to_pylist()}
    assert kinds == {"activation", "activation_grad", "parameter", "gradient", "update"}
    assert history.steps().column("step").to_pylist() == [1, 3, 6]
    assert set(history.coverage().column("num_ranks").to_pylist()) == {RANKS}


def test_activations_of_both_ranks_are_counted_and_replicated_weights_once(finished):
    history = open_history(finished[0])
    tokens = RANKS * BATCH * CONTEXT
    for kind, site, total in [
        ("activation", "layers.0.mlp.up", tokens * HIDDEN),
        ("parameter", "layers.0.mlp.up.weight", WIDTH * HIDDEN),
        ("gradient", "layers.0.mlp.up.weight", WIDTH * HIDDEN),
    ]:
        assert history.series(site, kind, "total").column("value").to_pylist() == [total] * 3


def test_rank_zero_alone_leaves_sinks(finished):
    out, _ = finished
    assert len(list((out / "tb").rglob("*tfevents*"))) == 1
    assert len(list(out.glob("*.jsonl"))) == 1


def test_a_second_demo_is_refused_by_name_and_changes_nothing(finished):
    out, _ = finished
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    done = rankfold_demo(out)
    assert done.returncode == 1
    assert done.stderr.startswith(f"[run_directory_in_use] {out} already holds a run")
    assert "Traceback" not in done.stderr
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_a_refusal_of_the_ranks_is_printed_once_and_without_a_traceback(tmp_path):
    (tmp_path / "thesis.txt").write_text("not ours")
    done = rankfold_demo(tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"[run_directory_foreign] {tmp_path}")
    assert done.stderr.count("run_directory_foreign") == 1
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_demo_that_is_stopped_leaves_no_process_and_a_record_that_reads(tmp_path):
    out = tmp_path / "run"
    command = [RANKFOLD, "demo", "--out", str(out), "--steps", "100000", "--hist-every", "1000"]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    assert any("step 10/" in line for line in demo.stdout)
    demo.send_signal(signal.SIGTERM)
    # The pipes end when the last process that holds them is gone.
    _, errors = demo.communicate(timeout=DEADLINE_S)
    assert demo.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in errors
    steps = open_history(out).steps().column("step").to_pylist()
    assert steps == [1, *range(5, 5 * len(steps), 5)]
