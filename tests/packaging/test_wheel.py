"""The wheel holds what it must, and works where it is all there is."""

import subprocess
import zipfile
from importlib.metadata import version
from pathlib import Path

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


def test_an_installed_wheel_answers_as_a_command_and_offers_its_aggregator(wheel_python, tmp_path):
    command = wheel_python.with_name("rankfold")
    assert run(command, "--version", cwd=tmp_path) == f"rankfold {version('rankfold')}\n"
    program = "from importlib.metadata import distribution; print(*distribution('rankfold').entry_points)"
    assert "rankfold.aggregators" in run(wheel_python, "-c", program, cwd=tmp_path)


def test_an_installed_wheel_imports_its_own_files(wheel_python, tmp_path):
    program = "import telemetry, aggregator, launch; print(telemetry.__file__, aggregator.__file__, launch.__file__)"
    found = run(wheel_python, "-c", program, cwd=tmp_path).split()
    assert len({Path(path).parent.parent for path in found}) == 1
    assert all(Path(path).is_relative_to(wheel_python.parent.parent) for path in found)


def test_a_folder_without_init_does_not_shadow_an_installed_wheel(wheel_python, tmp_path):
    (tmp_path / "telemetry").mkdir()
    (tmp_path / "train.py").write_text("import aggregator")
    subprocess.run([wheel_python, "train.py"], cwd=tmp_path, check=True, timeout=100)
