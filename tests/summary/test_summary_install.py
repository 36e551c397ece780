"""Installing: the kernel is one file for every Python, and where no compiler is there the package works without it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.packaging.environments import copy_sources

USE = """
import torch
from telemetry.summary import available_backends, backend_name, summarize
assert available_backends() == ("aten",), available_backends()
assert backend_name("cpu") == "aten"
summary = summarize(torch.tensor([1.0, 2.0, float("nan")]), histogram=True)
assert (summary.total, summary.finite, summary.mean) == (3, 2, 1.5)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    copy = tmp_path / "checkout"
    copy.mkdir()
    copy_sources(copy)
    return copy


def run(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, **kwargs)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def pip(*args: str) -> list[str]:
    return [sys.executable, "-m", "pip", *args, "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]


def test_without_a_compiler_the_package_installs_and_reduces_with_torch(checkout, tmp_path):
    target = tmp_path / "site"
    run(pip("install", "--target", str(target), str(checkout)), env={**os.environ, "CC": "/bin/false"})
    assert not list(target.rglob("_kernel*.so"))
    run([sys.executable, "-c", USE], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(target)})


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")
def test_with_a_compiler_one_wheel_serves_every_python(checkout, tmp_path):
    run(pip("wheel", "--wheel-dir", str(tmp_path), str(checkout)))
    (wheel,) = tmp_path.glob("*.whl")
    assert "-cp310-abi3-" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert "telemetry/summary/_kernel.abi3.so" in names
    assert not [name for name in names if name.endswith((".c", ".h"))]
