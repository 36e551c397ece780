"""What the doctor finds in an installation."""

import json

import pytest
import torch
from typer.testing import CliRunner

from launch import doctor
from launch.cli import app
from telemetry.summary import available_backends


def test_it_names_versions_and_the_code_that_reduces_tensors():
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 0
    assert f"tensors on the CPU are reduced by {available_backends()[0]}" in shown.stdout
    assert "torch " in shown.stdout


def test_the_json_form_holds_the_same_as_data():
    found = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert found["backends"] == list(available_backends())
    assert found["packages"]["rankfold"]


def test_without_a_kernel_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(doctor, "available_backends", lambda: ("aten",))
    (advice,) = doctor.inspect_installation().advice
    assert "install a C compiler" in advice


def checks(*words: str) -> tuple[int, dict[str, dict]]:
    shown = CliRunner().invoke(app, ["doctor", "--json", *words])
    return shown.exit_code, {check["name"]: check for check in json.loads(shown.stdout)["checks"]}


def test_a_clean_folder_is_sound(tmp_path):
    code, found = checks("--folder", str(tmp_path), "--run", str(tmp_path / "runs" / "new"))
    assert code == 0
    assert {name: check["state"] for name, check in found.items() if name.startswith("import")} == {
        "import telemetry": "ok",
        "import aggregator": "ok",
        "import launch": "ok",
    }
    assert found["hard links"]["state"] == "ok"
    assert "ms, median" in found["sync of a file"]["found"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("hiding", ["telemetry.py", "aggregator/__init__.py", "launch.py"])
def test_a_file_beside_the_script_that_hides_a_package_is_named(hiding, tmp_path):
    (tmp_path / hiding).parent.mkdir(exist_ok=True)
    (tmp_path / hiding).touch()
    code, found = checks("--folder", str(tmp_path))
    assert code == 3
    (bad,) = (check for check in found.values() if check["state"] == "failed")
    assert str(tmp_path / hiding) in bad["found"]
    assert "rename" in bad["remedy"]


def test_another_distribution_of_the_same_name_is_named(monkeypatch):
    monkeypatch.setattr("launch.checks.packages_distributions", lambda: {"telemetry": ["rankfold", "other-telemetry"]})
    code, found = checks()
    assert code == 3
    assert found["import telemetry"]["remedy"] == "pip uninstall other-telemetry"


def test_storage_without_hard_links_and_one_that_cannot_be_written_are_told_apart(tmp_path, monkeypatch):
    def no_links(*_args, **_options):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", no_links)
    _, found = checks("--run", str(tmp_path))
    assert found["hard links"]["state"] == "warning"
    (tmp_path / "file").touch()
    code, found = checks("--run", str(tmp_path / "file" / "run"))
    assert (code, found["storage"]["state"]) == (3, "failed")


@pytest.mark.parametrize(
    ("words", "code", "state"),
    [
        (["--layout", "pp=2,dp=2", "--world-size", "4"], 0, "ok"),
        (["--layout", "pp=2,dp=2"], 0, "ok"),
        (["--layout", "pp=2,dp=2", "--world-size", "8"], 3, "failed"),
    ],
)
def test_a_layout_has_to_have_as_many_places_as_the_job_has_ranks(words, code, state, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    done, found = checks(*words)
    assert (done, found["layout"]["state"]) == (code, state)


def test_collectives_come_with_their_version():
    found = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert found["collectives"]["gloo"] == f"of torch {torch.__version__}"


@pytest.mark.parametrize(("installed", "state"), [("2.60.0", "ok"), ("2.9.3", "warning"), ("1.13.0", "warning")])
def test_a_ray_that_is_older_than_what_was_tested_is_pointed_out(installed, state, monkeypatch):
    monkeypatch.setattr("launch.checks.version", lambda _: installed)
    _, found = checks()
    assert found["ray"]["state"] == state
    assert installed in found["ray"]["found"]


@pytest.mark.parametrize(
    ("error_s", "state", "text"),
    [(0.02, "ok", "20 ms at most"), (float("inf"), "warning", "nothing keeps it in time"), (None, "ok", "not tell")],
)
def test_a_clock_that_nothing_keeps_in_time_is_pointed_out(error_s, state, text, monkeypatch):
    monkeypatch.setattr("launch.checks.kernel_clock_error_s", lambda: error_s)
    _, found = checks()
    assert (found["clock"]["state"], text in found["clock"]["found"]) == (state, True)


def test_several_nodes_need_a_place_to_meet():
    shown = CliRunner().invoke(app, ["doctor", "--nnodes", "2"])
    assert "--rdzv-endpoint" in str(shown.exception)
