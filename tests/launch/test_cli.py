"""What the command line prints and how it exits."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

RANKFOLD = str(Path(sys.executable).with_name("rankfold"))


def rankfold(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([RANKFOLD, *arguments], capture_output=True, text=True, timeout=100)


def test_the_version_is_that_of_the_distribution():
    done = rankfold("--version")
    assert (done.returncode, done.stdout) == (0, f"rankfold {version('rankfold')}\n")


@pytest.mark.parametrize("arguments", [["nonsense"], ["demo", "--ranks", "0"], ["demo", "--every", "x"]])
def test_wrong_usage_exits_2_and_names_the_culprit(arguments):
    done = rankfold(*arguments)
    assert done.returncode == 2
    assert arguments[-2 if len(arguments) > 1 else 0] in done.stderr
    assert "Traceback" not in done.stderr


def test_a_rankfold_error_exits_1_with_code_and_remedy_and_no_traceback(monkeypatch, capsys):
    from launch import cli
    from telemetry.errors import RunDirectoryInUseError

    def refuse(_):
        raise RunDirectoryInUseError("runs/x already holds a run", remedy="name another [directory]")

    monkeypatch.setattr(cli, "app", refuse)
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "[run_directory_in_use] runs/x already holds a run\n  → name another [directory]\n"
