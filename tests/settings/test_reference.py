"""The page of settings says what ``watch`` reads."""

import inspect
import re
from pathlib import Path

import telemetry
from telemetry.collect.setting_values import SETTING_SPECS
from telemetry.collect.settings import DISABLE_VARIABLE, UNSET, Setting
from telemetry.collect.settings_file import CONFIG_VARIABLE

PAGE = (Path(__file__).resolve().parents[2] / "docs/reference/settings.md").read_text()
SPELT_OUT = {"to": "has to be given", "signals": "all five"}


def test_the_page_lists_every_setting_its_variable_and_its_default():
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| .* \| `?([^|`]+)`? \|$", PAGE, flags=re.MULTILINE)
    expected = [
        (spec.name, spec.variable, SPELT_OUT.get(spec.name, Setting(spec.name, spec.default, "").words))
        for spec in SETTING_SPECS
    ]
    assert rows == expected


def test_every_setting_is_an_argument_that_can_be_left_out_and_the_page_counts_them():
    arguments = inspect.signature(telemetry.watch).parameters
    assert {name for name, one in arguments.items() if one.default is UNSET} == {spec.name for spec in SETTING_SPECS}
    assert PAGE.split("\n")[2].startswith("Ten arguments")
    assert len(SETTING_SPECS) == 10


def test_the_page_names_the_other_variables():
    assert DISABLE_VARIABLE in PAGE
    assert CONFIG_VARIABLE in PAGE
