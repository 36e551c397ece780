"""Our import names are generic: a user's own file of such a name is met with an error that says which and where."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def as_module(folder: Path, name: str) -> Path:
    path = folder / f"{name}.py"
    path.write_text("")
    return path


def as_package(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    path = folder / name / "__init__.py"
    path.write_text("")
    return path


@pytest.mark.parametrize("shadow", [as_module, as_package])
@pytest.mark.parametrize(("shadowed", "imported"), [("telemetry", "aggregator"), ("aggregator", "launch")])
def test_a_shadowed_package_is_refused_by_an_error_that_names_both_paths(tmp_path, shadow, shadowed, imported):
    theirs = shadow(tmp_path, shadowed)
    script = tmp_path / "train.py"
    script.write_text(f"import {imported}")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: [import_shadowed]")
    assert str(ROOT / shadowed) in last
    assert str(theirs) in last


def test_the_documentation_names_the_symptom():
    page = (ROOT / "docs/how-to/import-is-shadowed.md").read_text()
    assert "[import_shadowed]" in page
    assert "is shadowed" in page
