"""The wheel holds what it must, and works where it is all there is."""

import json
import subprocess
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from launch.cluster_folder import cluster_folder
from launch.gates.discover import find_gates
from telemetry.errors import ClusterFilesMissingError
from tests.packaging.environments import run

PACKAGES = ("telemetry", "aggregator", "launch")


def test_the_wheel_holds_the_typed_packages_the_demos_scripts_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {*PACKAGES, f"rankfold-{version('rankfold')}.dist-info"}
    for package in PACKAGES:
        assert f"{package}/py.typed" in names
    assert "launch/demo/train.py" in names
    assert "launch/demo/__init__.py" not in names


def test_every_source_file_of_the_tree_is_in_the_wheel(wheel):
    root = Path(__file__).resolve().parents[2]
    names = set(zipfile.ZipFile(wheel).namelist())
    ours = {str(path.relative_to(root)) for package in PACKAGES for path in (root / package).rglob("*.py")}
    page = {str(path.relative_to(root)) for path in (root / "aggregator/report/page").iterdir()}
    assert len(page) == 3
    assert ours | page <= names


def test_every_file_of_the_cluster_folder_is_in_the_wheel(wheel):
    root = Path(__file__).resolve().parents[2] / "cluster"
    files = {path.relative_to(root) for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert files >= {Path("README.md"), Path("slurm/train.sbatch.j2")}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {str("launch/cluster_files" / path) for path in files} <= names
    assert not [name for name in names if "__pycache__" in name]


def test_an_installed_wheel_finds_its_cluster_folder_and_a_checkout_its_own(wheel_python, tmp_path):
    program = "from launch.cluster_folder import cluster_folder; print(cluster_folder())"
    installed = Path(run(wheel_python, "-c", program, cwd=tmp_path).strip())
    assert installed.is_relative_to(wheel_python.parent.parent)
    assert (installed / "README.md").is_file()
    assert cluster_folder() == Path(__file__).resolve().parents[2] / "cluster"


def test_an_installation_without_the_cluster_folder_says_so(monkeypatch, tmp_path):
    places = (tmp_path / "launch/cluster_files", tmp_path / "cluster")
    places[1].mkdir()
    monkeypatch.setattr("launch.cluster_folder._PLACES", places)
    with pytest.raises(ClusterFilesMissingError, match="pip install"):
        cluster_folder()


def test_an_installed_wheel_answers_as_a_command_and_offers_its_aggregator(wheel_python, tmp_path):
    command = wheel_python.with_name("rankfold")
    assert run(command, "--version", cwd=tmp_path) == f"rankfold {version('rankfold')}\n"
    program = "from importlib.metadata import distribution; print(*distribution('rankfold').entry_points)"
    assert "rankfold.aggregators" in run(wheel_python, "-c", program, cwd=tmp_path)


def test_an_installed_wheel_has_the_gates_and_the_rendezvous_for_torchrun(wheel_python, tmp_path):
    listed = json.loads(run(wheel_python.with_name("rankfold"), "gate", "list", "--json", cwd=tmp_path))
    assert {row["name"] for row in listed} == {found.gate.name for found in find_gates()}
    program = (
        "from importlib.metadata import entry_points as e; print(*[p.load() for p in e(group='torchrun.handlers')])"
    )
    assert "plugin" in run(wheel_python, "-c", program, cwd=tmp_path)


def test_an_installed_wheel_imports_its_own_files(wheel_python, tmp_path):
    program = "import telemetry, aggregator, launch; print(telemetry.__file__, aggregator.__file__, launch.__file__)"
    found = run(wheel_python, "-c", program, cwd=tmp_path).split()
    assert len({Path(path).parent.parent for path in found}) == 1
    assert all(Path(path).is_relative_to(wheel_python.parent.parent) for path in found)


def test_a_folder_without_init_does_not_shadow_an_installed_wheel(wheel_python, tmp_path):
    (tmp_path / "telemetry").mkdir()
    (tmp_path / "train.py").write_text("import aggregator")
    subprocess.run([wheel_python, "train.py"], cwd=tmp_path, check=True, timeout=100)
