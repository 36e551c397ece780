"""Manifests read back, checked against the schemas, and seen as Kubernetes would see their words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

__all__ = ["expanded", "load", "problems"]

FOLDER = Path(__file__).with_name("schemas")
SCHEMAS = {path.name: json.loads(path.read_text()) for path in FOLDER.glob("*.json")}
REGISTRY = Registry().with_resources((name, Resource.from_contents(schema)) for name, schema in SCHEMAS.items())


def load(text: str) -> dict[str, Any]:
    """Return the objects of a manifest by their kinds."""
    objects = list(yaml.safe_load_all(text))
    return {one["kind"]: one for one in objects}


def problems(manifest: Mapping[str, Any]) -> list[str]:
    """Return what the API would refuse of an object: the place and the reason."""
    validator = Draft202012Validator(SCHEMAS[f"{manifest['kind'].lower()}.json"], registry=REGISTRY)
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(manifest)]


def expanded(word: str, variables: Mapping[str, str]) -> str:
    """Replace ``$(NAME)`` in a word of a command as the kubelet does.

    A name that is unknown stays as it is, and ``$$`` is a dollar that begins nothing.
    """
    result, i = "", 0
    while i < len(word):
        rest = word[i:]
        end = rest.find(")")
        if rest.startswith("$$"):
            result, i = result + "$", i + 2
        elif rest.startswith("$(") and end > 0:
            result, i = result + variables.get(rest[2:end], rest[: end + 1]), i + end + 1
        else:
            result, i = result + rest[0], i + 1
    return result
