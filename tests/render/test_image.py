"""The Dockerfile: what it builds on, who it runs as, and that signals reach the command."""

import json
import re
from importlib.metadata import metadata, version

from launch.render import Target, render
from tests.render.specs import SPECS, make_spec

INSTRUCTIONS = {
    "ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "ONBUILD", "RUN",
    "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR",
}  # fmt: skip


def instructions_of(text):
    """Return name and argument of each instruction: comments go first, then continued lines become one."""
    kept = "\n".join(line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    return [tuple(line.split(maxsplit=1)) for line in re.sub(r"\\\n\s*", "", kept).splitlines()]


def test_every_line_is_an_instruction_and_the_base_image_is_an_argument():
    found = instructions_of(render(make_spec(), Target.image))
    assert {name for name, _ in found} <= INSTRUCTIONS
    assert found[:2] == [("ARG", "BASE_IMAGE"), ("FROM", "${BASE_IMAGE}")]
    assert [name for name, _ in found].count("FROM") == 1


def test_it_installs_this_version_with_extras_that_exist():
    arguments = [value for name, value in instructions_of(render(make_spec(), Target.image)) if name == "ARG"]
    found = re.fullmatch(r'RANKFOLD="rankfold\[([\w,]+)\]==(.+)"', arguments[1])
    assert found[2] == version("rankfold")
    assert set(found[1].split(",")) <= set(metadata("rankfold").get_all("Provides-Extra"))


def test_the_command_has_no_shell_before_it_and_runs_as_no_root():
    found = instructions_of(render(make_spec(), Target.image))
    last = dict(found)
    assert json.loads(last["ENTRYPOINT"]) == ["tini", "--"]
    assert json.loads(last["CMD"])[0] == "rankfold"
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", last["USER"])
    names = [name for name, _ in found]
    assert "RUN" not in names[names.index("USER") :], "what is built belongs to root, what is run does not"


def test_words_of_the_job_do_not_reach_it():
    odd = {**SPECS["odd"], "name": "exp1", "script": "train.py\nRUN x"}
    assert render(make_spec(**odd), Target.image) == render(make_spec(), Target.image)
