"""Argument before environment before file before default, each with its origin; what is malformed is named."""

import builtins
import sys
from types import SimpleNamespace

import pytest

from telemetry.collect import settings_file
from telemetry.collect.setting_values import SETTING_SPECS
from telemetry.collect.settings import UNSET, Suggested, resolve_settings
from telemetry.errors import ConfigurationError, SettingMalformedError
from telemetry.sites import SIGNALS

NOTHING = dict.fromkeys((spec.name for spec in SETTING_SPECS), UNSET)


def resolve(folder, environ=(), **arguments):
    return resolve_settings({**NOTHING, "to": "runs/x", **arguments}, dict(environ), folder)


def origins(settings):
    return {setting.name: (setting.value, setting.origin) for setting in settings.changed if setting.name != "to"}


def test_without_anything_all_are_defaults(tmp_path):
    settings = resolve(tmp_path)
    assert origins(settings) == {}
    assert settings.failure is None
    assert (settings["signals"], settings["every"], settings["hist_every"], settings["health"]) == (
        SIGNALS,
        50,
        200,
        True,
    )


def test_argument_before_environment_before_file_before_default(tmp_path):
    (tmp_path / "rankfold.toml").write_text("every = 3\nhist_every = 30\nlast_step = 300\n")
    environ = {"RANKFOLD_EVERY": "2", "RANKFOLD_HIST_EVERY": "20"}
    settings = resolve(tmp_path, environ, every=1)
    assert origins(settings) == {
        "every": (1, "argument"),
        "hist_every": (20, "RANKFOLD_HIST_EVERY"),
        "last_step": (300, "rankfold.toml"),
    }
    assert settings.failure is None


def test_what_a_framework_suggests_is_weaker_than_all_that_is_set_anywhere(tmp_path):
    (tmp_path / "rankfold.toml").write_text("last_step = 300\n")
    suggested = {name: Suggested(9, "Trainer") for name in ("every", "hist_every", "last_step")}
    settings = resolve(tmp_path, {"RANKFOLD_HIST_EVERY": "20"}, **suggested)
    assert origins(settings) == {
        "every": (9, "Trainer"),
        "hist_every": (20, "RANKFOLD_HIST_EVERY"),
        "last_step": (300, "rankfold.toml"),
    }


def test_none_is_an_argument_like_any_other(tmp_path):
    assert resolve(tmp_path, {"RANKFOLD_HIST_EVERY": "7"}, hist_every=None)["hist_every"] is None


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("to", " ray://watch ", "ray://watch"),
        ("signals", "gradients, updates", ("gradients", "updates")),
        ("signals", "none", ()),
        ("select", "layers.*,head", ("layers.*", "head")),
        ("exclude", "none", ()),
        ("every", "100", 100),
        ("every", "activations=100, gradients=10", {"activations": 100, "gradients": 10}),
        ("hist_every", "none", None),
        ("last_step", "0", 0),
        ("full_updates", "yes", True),
        ("budget_ms", "2.5", 2.5),
        ("budget_ms", "none", None),
        ("health", "Off", False),
    ],
)
def test_a_variable_is_read_as_the_argument_would_be(name, text, value, tmp_path):
    settings = resolve_settings({**NOTHING}, {"RANKFOLD_TO": "x", f"RANKFOLD_{name.upper()}": text}, tmp_path)
    assert settings.failure is None
    assert (settings[name], settings.by_name[name].origin) == (value, f"RANKFOLD_{name.upper()}")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("signals", "gradients,losses"),
        ("signals", "gradients,,updates"),
        ("every", "0"),
        ("every", "often"),
        ("every", "activations=100,10"),
        ("every", "weights=3"),
        ("hist_every", "-1"),
        ("last_step", "1e3"),
        ("full_updates", "maybe"),
        ("budget_ms", "little"),
        ("health", "2"),
    ],
)
def test_a_malformed_variable_is_refused_by_name_even_where_an_argument_overrides_it(name, text, tmp_path):
    variable = f"RANKFOLD_{name.upper()}"
    for arguments in ({}, {name: "of the code"}):
        failure = resolve(tmp_path, {variable: text}, **arguments).failure
        assert isinstance(failure, SettingMalformedError)
        assert variable in str(failure)
        assert repr(text) in str(failure)
        assert failure.remedy


def test_an_empty_variable_counts_as_unset(tmp_path):
    assert origins(resolve(tmp_path, {"RANKFOLD_EVERY": " "})) == {}


def test_toml_has_types_and_tables(tmp_path):
    (tmp_path / "rankfold.toml").write_text(
        'select = ["layers.*", "head"]\nsignals = []\nfull_updates = true\nhist_every = "none"\n[every]\nupdates = 5\n'
    )
    settings = resolve(tmp_path)
    assert settings.failure is None
    assert [settings[name] for name in ("select", "signals", "full_updates", "hist_every", "every")] == [
        ("layers.*", "head"),
        (),
        True,
        None,
        {"updates": 5},
    ]


def test_the_table_of_a_pyproject_counts_and_rankfold_toml_goes_before_it(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.rankfold]\nevery = 7\n[tool.other]\nevery = 1\n")
    assert origins(resolve(tmp_path)) == {"every": (7, "pyproject.toml")}
    (tmp_path / "rankfold.toml").write_text("every = 8\n")
    assert origins(resolve(tmp_path)) == {"every": (8, "rankfold.toml")}


def test_folders_above_are_not_searched(tmp_path):
    (tmp_path / "rankfold.toml").write_text("every = 7\n")
    (tmp_path / "below").mkdir()
    assert origins(resolve(tmp_path / "below")) == {}


def test_a_named_file_is_the_only_one(tmp_path):
    (tmp_path / "rankfold.toml").write_text("every = 7\n")
    (tmp_path / "other.toml").write_text("hist_every = 9\n")
    settings = resolve(tmp_path, {"RANKFOLD_CONFIG": "other.toml"})
    assert origins(settings) == {"hist_every": (9, "other.toml (named by RANKFOLD_CONFIG)")}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("every =", "rankfold.toml"),
        ("evry = 5", "'evry'"),
        ("every = 2.5", "every in rankfold.toml is 2.5"),
        ("every = true", "every in rankfold.toml is True"),
        ("full_updates = 1", "full_updates in rankfold.toml is 1"),
        ("select = [1]", "select in rankfold.toml is [1]"),
    ],
)
def test_a_bad_file_is_refused_with_its_name_and_key(content, says, tmp_path):
    (tmp_path / "rankfold.toml").write_text(content)
    failure = resolve(tmp_path).failure
    assert isinstance(failure, SettingMalformedError)
    assert says in str(failure)


def test_a_named_file_that_is_not_there_is_refused(tmp_path):
    failure = resolve(tmp_path, {"RANKFOLD_CONFIG": "gone.toml"}).failure
    assert isinstance(failure, SettingMalformedError)
    assert "gone.toml" in str(failure)


def test_no_destination_anywhere_is_refused(tmp_path):
    failure = resolve_settings(NOTHING, {}, tmp_path).failure
    assert isinstance(failure, ConfigurationError)
    assert "RANKFOLD_TO" in failure.remedy


@pytest.mark.parametrize("text", ["1", "true", "YES", "please", "on"])
def test_all_that_is_no_clear_off_turns_telemetry_off(text, tmp_path):
    assert resolve(tmp_path, {"RANKFOLD_DISABLE": text}).is_disabled


@pytest.mark.parametrize("text", ["", "0", "False", "no", "off", " "])
def test_a_clear_off_leaves_it_on(text, tmp_path):
    assert not resolve(tmp_path, {"RANKFOLD_DISABLE": text}).is_disabled


def test_python_without_a_toml_parser_of_its_own_uses_tomli(tmp_path, monkeypatch):
    parser = pytest.importorskip("tomllib")
    (tmp_path / "rankfold.toml").write_text("every = 7\n")
    monkeypatch.setattr(settings_file, "sys", SimpleNamespace(version_info=(3, 10)))
    monkeypatch.setitem(sys.modules, "tomllib", None)
    monkeypatch.setitem(sys.modules, "tomli", parser)
    assert origins(resolve(tmp_path)) == {"every": (7, "rankfold.toml")}


def test_values_are_shown_as_a_reader_would_write_them(tmp_path):
    settings = resolve(
        tmp_path, {"RANKFOLD_EVERY": "updates=5"}, select=(builtins.str, "a.*"), exclude=[], health=False
    )
    assert [str(setting) for setting in settings.changed] == [
        "to = runs/x (argument)",
        "select = str, a.* (argument)",
        "exclude = none (argument)",
        "every = updates=5 (RANKFOLD_EVERY)",
        "health = off (argument)",
    ]
