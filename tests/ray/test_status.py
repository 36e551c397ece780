"""``rankfold status``: what the command line says of the actors of a run."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from launch.cli import app
from tests.ray.clusters import PATIENT, in_parallel, world


def rankfold(*words):
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


def test_status_says_how_each_attempt_is_for_people_and_for_programs(cluster, name, tmp_path):
    ranks = world(2, name, tmp_path / "run")
    in_parallel([lambda rank=rank: rank.attach(PATIENT) for rank in ranks])
    for rank in ranks:
        rank.submit(7)
    for rank in ranks:
        rank.wait_until_settled()
    printed = rankfold("status", f"ray://{name}")
    assert printed.exit_code == 0, printed.output
    for text in ("merging", str(tmp_path / "run"), "1 up to 7, 0 lack ranks", "2 of 2, silent: none"):
        assert text in printed.output
    (status,) = json.loads(rankfold("status", f"ray://{name}", "--json").output)
    assert (status["attempt"], status["newest_step"], status["num_pending_steps"]) == ("attempt", 7, 0)
    assert status["account"]["num_committed"] == 1
    in_parallel([rank.close for rank in ranks])


def test_status_of_nothing_exits_with_one_and_of_nonsense_with_an_error(cluster):
    nothing = rankfold("status", "ray://nobody")
    assert (nothing.exit_code, nothing.output.strip()) == (1, "no actor runs under ray://nobody")
    with pytest.raises(Exception, match="no destination under Ray"):
        CliRunner().invoke(app, ["status", "runs/exp1"], catch_exceptions=False)
