"""Programs run with a deadline, and where an environment keeps its packages."""

import shutil
import subprocess
import sysconfig
from pathlib import Path

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


def copy_sources(folder: Path) -> None:
    """Copy what a build reads, without what earlier builds have left."""
    for name in BUILD_INPUTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, folder)


def run(*command: object, cwd: Path) -> str:
    """Run a command and return what it printed; its standard error is the message of a failure."""
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def site_packages_of(environment: Path) -> Path:
    """Return where an environment of this Python keeps its packages."""
    return Path(sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)}))
