"""Installing beside somebody's torch changes nothing of it.

pip resolves from the metadata of what is installed. So each environment here holds the metadata of all that we depend
on, and of one build of torch; pip then says what it would install, without an index.
"""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch

from tests.packaging.environments import site_packages_of


@pytest.fixture
def environment_with_torch(tmp_path):
    def make(torch_version: str) -> Path:
        venv.create(tmp_path, with_pip=False, symlinks=True)
        there = site_packages_of(tmp_path)
        for metadata in Path(sysconfig.get_path("purelib")).glob("*.dist-info"):
            if not metadata.name.startswith(("torch-", "rankfold-")):
                (there / metadata.name).symlink_to(metadata)
        ours = there / f"torch-{torch_version}.dist-info"
        ours.mkdir()
        (ours / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {torch_version}\n")
        return tmp_path / "bin" / "python"

    return make


def dry_run(python: Path, wheel: Path) -> subprocess.CompletedProcess[str]:
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    command = [*pip, "install", "--dry-run", "--quiet", "--no-index", "--report", "-", str(wheel)]
    # Without the machine's own configuration, which may name a folder of wheels.
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    env = {**plain, "PIP_CONFIG_FILE": os.devnull}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)


@pytest.mark.parametrize("torch_version", ["2.6.0", "2.6.0+cu124", "2.9.1+rocm6.4", torch.__version__])
def test_installing_beside_a_supported_torch_would_install_rankfold_alone(wheel, environment_with_torch, torch_version):
    done = dry_run(environment_with_torch(torch_version), wheel)
    assert done.returncode == 0, done.stderr
    planned = [item["metadata"]["name"] for item in json.loads(done.stdout)["install"]]
    assert planned == ["rankfold"]


def test_a_torch_that_is_too_old_is_not_accepted_in_silence(wheel, environment_with_torch):
    done = dry_run(environment_with_torch("2.5.1+cu124"), wheel)
    assert done.returncode != 0
    assert "torch" in done.stderr
