"""The reference says what the code says."""

import re
from pathlib import Path

import pytest
import typer.main

from launch.cli import app
from launch.lazy import LAZY_COMMANDS
from telemetry.errors import RankfoldError

DOCS = Path(__file__).resolve().parents[2] / "docs"


def all_error_classes(cls=RankfoldError):
    yield cls
    for below in cls.__subclasses__():
        if below.__module__.startswith(("telemetry", "aggregator", "launch")):
            yield from all_error_classes(below)


def test_the_page_of_errors_lists_every_code_and_invents_none():
    page = (DOCS / "reference/errors.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)
    codes = {cls.code for cls in all_error_classes()} - {RankfoldError.code}
    assert len(listed) == len(set(listed))
    assert codes - set(listed) == set(), "codes without a row"
    assert set(listed) - codes == set(), "rows without a code"


def test_no_two_errors_share_a_code():
    classes = list(all_error_classes())
    assert len({cls.code for cls in classes}) == len(classes)


def test_the_page_of_the_command_line_lists_every_option_of_the_demo_with_its_default():
    page = (DOCS / "reference/cli.md").read_text()
    command = typer.main.get_command(app)
    (demo,) = (one for name, one in command.commands.items() if name == "demo")
    options = {max(option.opts, key=len): option.default for option in demo.params if option.name != "help"}
    (section,) = re.findall(r"^## `rankfold demo`$(.*?)^## ", page, flags=re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| `(--[\w-]+)` \| `?([\w/]+)`? \|", section, flags=re.MULTILINE)
    assert dict(rows) == {name: str(default) for name, default in options.items()}


@pytest.mark.parametrize("name", ["render", "run", "gate run"])
def test_the_page_of_the_command_line_lists_every_option_of_a_command_that_starts_jobs_with_its_default(name):
    page = (DOCS / "reference/cli.md").read_text()
    command = LAZY_COMMANDS[name.split()[0]].load(name.split()[0])
    if " " in name:
        command = command.commands[name.split()[1]]
    options = {
        max(one.opts, key=len): one.default for one in command.params if one.opts[0][0] == "-" and one.name != "help"
    }
    (section,) = re.findall(rf"^## `rankfold {name.split()[0]}\b.*?$(.*?)^## ", page, flags=re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| (`--[^|]+)\|([^|]*)\|", section, flags=re.MULTILINE)
    listed = {option: default.strip() for names, default in rows for option in re.findall(r"--[\w-]+", names)}
    assert set(listed) == set(options)
    if name == "render":
        with_default = {
            option: f"`{value}`" for option, value in options.items() if isinstance(value, int | str | Path) and value
        }
        assert with_default.items() <= listed.items()


@pytest.mark.parametrize("page", sorted(DOCS.parent.glob("*.md")) + sorted(DOCS.rglob("*.md")), ids=lambda p: p.name)
def test_every_relative_link_leads_to_a_file(page):
    targets = re.findall(r"\]\((?!https?://)([^)#\s]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []
