"""Ray is optional: where it is absent, a destination under Ray says how to install it, and nothing else notices."""

import subprocess
import sys

import pytest

from aggregator.ray_actor.destination import RayDestination
from telemetry.errors import ConfigurationError

WITHOUT = """
import sys
sys.modules["ray"] = None          # what an import finds where it is not installed
from torch import nn
import telemetry
from telemetry.protocol import load_aggregator
try:
    telemetry.watch(nn.Linear(2, 2), to="ray://exp1", every=1)
except telemetry.RankfoldError as error:
    print(error.code, "|", error.remedy)
telemetry.watch(nn.Linear(2, 2), to=sys.argv[1], every=1).close()
print("ray" in {name.partition(".")[0] for name, module in sys.modules.items() if module is not None})
"""


def test_without_ray_attach_says_how_to_install_it_and_a_directory_still_works(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(tmp_path / "run")], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["aggregator_unavailable | pip install 'rankfold[ray]'", "False"]
    assert (tmp_path / "run" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("text", "name", "directory"),
    [
        ("ray://exp1", "exp1", "runs/exp1"),
        ("ray://exp1?dir=/shared/runs/a%20b", "exp1", "/shared/runs/a b"),
        ("ray://Exp-1.b_2?dir=rel/ative", "Exp-1.b_2", "rel/ative"),
    ],
)
def test_a_destination_is_a_name_and_perhaps_a_directory(text, name, directory):
    found = RayDestination.parse(text)
    assert (found.name, found.directory) == (name, directory)
    assert RayDestination.parse(str(found)) == found


@pytest.mark.parametrize(
    "text",
    [
        "ray://",
        "ray://a/b",
        "ray://a b",
        "ray://exp1?folder=/x",
        "ray://exp1?dir=",
        "ray://exp1?dir=/a&dir=/b",
        "x://a",
    ],
)
def test_anything_else_is_refused_with_the_grammar(text):
    with pytest.raises(ConfigurationError, match=r"ray://NAME\?dir=PATH"):
        RayDestination.parse(text)
