"""A wheel of this tree, built once, and environments to put it into."""

import shutil
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.packaging.environments import run, site_packages_of

ROOT = Path(__file__).resolve().parents[2]
BUILD_INPUTS = (
    "pyproject.toml",
    "setup.py",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "telemetry",
    "aggregator",
    "launch",
    "cluster",
)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """Build from a copy: a build in the tree would take up what earlier ones left there."""
    source = tmp_path_factory.mktemp("source")
    for name in BUILD_INPUTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", source / "dist", ".", cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="session")
def wheel_python(wheel, tmp_path_factory):
    """The interpreter of a fresh environment that has our wheel, and borrows what we depend on from this one."""
    folder = tmp_path_factory.mktemp("wheel-env")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    # A path line is not searched for further .pth files, so that our own editable install stays outside.
    (site_packages_of(folder) / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return python
