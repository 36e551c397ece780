"""``rankfold gate``: what is listed, run, refused and reported, and how each exits."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

from launch import cli
from launch.gates import Trial, discover, trial
from launch.gates.stopping import Stopped
from launch.gates.trial import RanksFailedError
from tests.gates.gate_files import write_endless, write_gate

PASSING = 'return {"number": 4, "cost": 0.5, "kept": "as a note"}'
DEADLINE_S = 100


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    folder = tmp_path / "cluster"
    folder.mkdir()
    monkeypatch.setattr(discover, "cluster_folder", lambda: folder)
    return folder


def gate(capsys, *arguments):
    code = cli.run(["gate", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_the_list_says_what_would_run_be_rehearsed_or_not_run_here_and_why(cluster, capsys):
    write_gate(cluster, "plain", PASSING)
    write_gate(cluster, "on-gpus", PASSING, gpus=99)
    write_gate(cluster, "with-module", PASSING, modules={"not_there.at_all": "pip install it"})
    code, text, _ = gate(capsys, "list", "--json")
    rows = {row["name"]: (row["here"], row["why"]) for row in json.loads(text)}
    assert code == 0
    assert rows["plain"] == ("real", "")
    assert rows["on-gpus"][0] == "rehearsal"
    assert "needs 99" in rows["on-gpus"][1]
    assert rows["with-module"] == ("not run", "not_there.at_all is not installed: pip install it")
    code, text, _ = gate(capsys, "list")
    assert all(word in text for word in ("on-gpus", "99 GPUs a node", "the number is small"))


def test_passed_failed_and_not_run_each_have_a_verdict_with_a_reason_and_3_is_the_exit(cluster, tmp_path, capsys):
    write_gate(cluster, "passes", PASSING, gpus=99)
    write_gate(cluster, "fails", 'return {"number": 7, "cost": 0.5}')
    write_gate(cluster, "raises", 'raise OSError("the disk is gone")')
    write_gate(cluster, "cannot", 'raise NotRunError("no scheduler")')
    write_gate(cluster, "lacks", PASSING, modules={"not_there": "pip install it"})
    out = tmp_path / "out"
    code, text, _ = gate(capsys, "run", "--out", out)
    assert code == 3
    assert "1 passed (1 in rehearsal, which says nothing about this cluster), 2 failed, 2 not run" in text
    code, text, _ = gate(capsys, "report", out, "--json")
    verdicts = {row["gate"]: row for row in json.loads(text)}
    assert code == 3
    assert {name: (row["verdict"], row["mode"]) for name, row in verdicts.items()} == {
        "passes": ("passed", "rehearsal"),
        "fails": ("failed", "cluster"),
        "raises": ("failed", "cluster"),
        "cannot": ("not_run", "cluster"),
        "lacks": ("not_run", "cluster"),
    }
    assert verdicts["fails"]["reason"] == "number is 7, has to be at most 5 s"
    assert verdicts["raises"]["reason"] == "OSError: the disk is gone"
    assert verdicts["cannot"]["reason"] == "no scheduler"
    assert verdicts["lacks"]["reason"] == "not_there is not installed: pip install it"
    assert verdicts["passes"]["notes"] == {"kept": "as a note"}
    assert verdicts["passes"]["proves"] == "that it is small here"
    code, text, _ = gate(capsys, "report", out)
    assert code == 3
    assert "fails: number is 7, has to be at most 5 s" in text


def test_all_passed_exits_0_and_nothing_that_ran_exits_3(cluster, tmp_path, capsys):
    write_gate(cluster, "passes", PASSING)
    write_gate(cluster, "on-gpus", PASSING, gpus=99)
    assert gate(capsys, "run", "passes", "--out", tmp_path / "one")[0] == 0
    code, text, _ = gate(capsys, "run", "on-gpus", "--no-rehearsal", "--out", tmp_path / "two")
    assert code == 3
    assert "0 passed, 0 failed, 1 not run" in text
    assert "the gate needs 99" in text


def test_earlier_results_are_replaced_only_by_force(cluster, tmp_path, capsys):
    write_gate(cluster, "passes", PASSING)
    out = tmp_path / "out"
    assert gate(capsys, "run", "passes", "--out", out)[0] == 0
    before = (out / "passes.json").read_text()
    code, _, err = gate(capsys, "run", "passes", "--out", out)
    assert code == 1
    assert err.startswith("[gate_verdict_exists]")
    assert (out / "passes.json").read_text() == before
    write_gate(cluster, "passes", PASSING.replace("4", "9"))
    (out / "passes" / "run").mkdir()
    assert gate(capsys, "run", "passes", "--out", out, "--force")[0] == 3
    assert json.loads((out / "passes.json").read_text())["verdict"] == "failed"
    assert not (out / "passes" / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nonsense"], "there is no gate 'nonsense'"),
        (["--nnodes", "2"], "2 nodes have no place to meet"),
        (["--node-rank", "1"], "node 1 is none of 1 nodes"),
        (["--nnodes", "2", "--rdzv-endpoint", "a:1", "--force"], "several nodes cannot agree"),
        (["--rehearse", "--no-rehearsal"], "contradict each other"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(cluster, tmp_path, capsys, arguments, says):
    write_gate(cluster, "passes", PASSING)
    code, _, err = gate(capsys, "run", *arguments, "--out", tmp_path / "out")
    assert code == 1
    assert says in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda wire: "no json", "cannot be read as JSON"),
        (lambda wire: "[]", "has not the keys"),
        (lambda wire: json.dumps({**wire, "verdict": "fine"}), "has the verdict 'fine'"),
        (lambda wire: json.dumps({**wire, "gate": "other"}), "is about the gate 'other'"),
        (lambda wire: json.dumps({**wire, "measured": [{"name": "number"}]}), "without its limit"),
        (lambda wire: json.dumps({**wire, "duration_s": "long"}), "has a duration_s that is 'long'"),
    ],
)
def test_a_file_that_is_no_verdict_is_refused_by_name(cluster, tmp_path, capsys, damage, says):
    write_gate(cluster, "passes", PASSING)
    file = tmp_path / "passes.json"
    gate(capsys, "run", "--out", tmp_path)
    file.write_text(damage(json.loads(file.read_text())))
    code, _, err = gate(capsys, "report", tmp_path)
    assert code == 1
    assert err.startswith(f"[gate_verdict_malformed] {file}")
    assert says in err


def test_a_folder_without_verdicts_is_refused(tmp_path, capsys):
    code, _, err = gate(capsys, "report", tmp_path)
    assert (code, "holds no verdicts" in err) == (1, True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_run_with_its_number_and_keeps_the_verdicts_until_then(cluster, tmp_path, capsys, number):
    write_gate(cluster, "a-passes", PASSING)
    write_gate(cluster, "b-stopped", f"import os; os.kill(os.getpid(), {int(number)}); " + PASSING)
    write_gate(cluster, "c-passes", PASSING)
    code, _, err = gate(capsys, "run", "--out", tmp_path / "out")
    assert code == 128 + number
    assert f"stopped by {number.name}; the verdicts until then are in" in err
    assert [path.name for path in (tmp_path / "out").glob("*.json")] == ["a-passes.json"]


def test_ranks_that_a_signal_has_ended_stop_the_run_and_have_not_failed(tmp_path, monkeypatch):
    (tmp_path / "gate.py").touch()
    ended = 128 + signal.SIGTERM
    monkeypatch.setattr(trial, "run_supervised", lambda *args, **options: ended)
    with pytest.raises(Stopped, match="SIGTERM"):
        Trial(file=tmp_path / "gate.py", out=tmp_path, is_rehearsal=True, num_ranks=2).run_ranks()
    ended = 1
    with pytest.raises(RanksFailedError, match="the ranks ended with 1"):
        Trial(file=tmp_path / "gate.py", out=tmp_path, is_rehearsal=True, num_ranks=2).run_ranks()


STARTED = """
import sys
from pathlib import Path
from launch import cli
from launch.gates import discover
discover.cluster_folder = lambda: Path(sys.argv[1])
sys.exit(cli.run(["gate", "run", "--out", sys.argv[2]]))
"""


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_ranks_and_keeps_the_verdicts_until_then(tmp_path, number):
    write_gate(tmp_path, "a-passes", PASSING)
    write_endless(tmp_path, "b-endless")
    out = tmp_path / "out"
    command = [sys.executable, "-c", STARTED, str(tmp_path), str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log, until = out / "b-endless" / "ranks.log", time.monotonic() + DEADLINE_S
    while not (log.exists() and "ready" in log.read_text()) and time.monotonic() < until:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    printed, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + number
    assert "the verdicts until then are in" in printed
    assert [path.name for path in out.glob("*.json")] == ["a-passes.json"]
