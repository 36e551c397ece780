"""What the doctor finds in an installation."""

import json

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
