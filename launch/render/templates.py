"""Templates with values of any kind in them: each value is quoted for the language that it stands in."""

from __future__ import annotations

import json
import re
import shlex
from importlib import import_module
from typing import Final
from urllib.parse import quote

from launch.cluster_folder import cluster_folder
from launch.render.spec import LaunchSpec
from telemetry.errors import RenderUnavailableError
from telemetry.version import VERSION

__all__ = ["fill"]

# What YAML does not let stand, and what it reads as the end of a line; JSON quotes only what is below the space.
_UNPRINTABLE: Final = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def fill(path: str, spec: LaunchSpec) -> str:
    """Return a template of the cluster folder, filled in.

    A template has ``spec`` and ``version``, and the filters ``word`` (shell), ``yaml`` (a string of YAML),
    ``literal`` (a value of a container, in which Kubernetes would replace ``$(NAME)``) and ``urlquote``.

    Args:
        path: of the template, below the cluster folder.
        spec: what is rendered.

    Raises:
        ClusterFilesMissingError: the installation lacks the templates.
        RenderUnavailableError: Jinja is not installed.
    """
    try:
        jinja2 = import_module("jinja2")
    except ImportError as error:
        raise RenderUnavailableError(
            f"templates are filled in by Jinja, which cannot be imported: {error}",
            remedy="pip install 'rankfold[cluster]'",
        ) from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(cluster_folder()),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"word": shlex.quote, "yaml": _yaml, "literal": _literal, "urlquote": quote}
    return str(environment.get_template(path).render(spec=spec, version=VERSION))


def _yaml(text: str) -> str:
    """Quote for YAML 1.1 and 1.2: JSON is a part of both, but for a few characters that it leaves as they are."""
    quoted = json.dumps(text, ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", quoted)


def _literal(text: str) -> str:
    """Quote a word of a container's command, or a variable's value, that is to arrive as it is."""
    return _yaml(text.replace("$", "$$"))
