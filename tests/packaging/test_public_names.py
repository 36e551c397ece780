"""What a module exports is what it lists, and what it lists is there."""

import importlib
import pkgutil

import pytest

import aggregator
import launch
import telemetry

MODULES = [
    found.name
    for package in (telemetry, aggregator, launch)
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if ".demo." not in found.name
]


@pytest.mark.parametrize("name", MODULES)
def test_every_name_in_all_exists_and_every_public_definition_is_in_it(name):
    module = importlib.import_module(name)
    listed = set(getattr(module, "__all__", ()))
    assert listed <= set(vars(module))
    defined_here = {
        attribute
        for attribute, value in vars(module).items()
        if not attribute.startswith("_") and getattr(value, "__module__", None) == name and hasattr(value, "__name__")
    }
    assert not listed or defined_here <= listed
