"""Every gate is carried out from end to end on the CPU, by the command that a cluster team uses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launch.gates.discover import find_gates
from launch.gates.runner import impossible

# The quickest one that trains ranks is carried out in every run of the tests.
ALWAYS = "replica-fault"
GATES = {found.gate.name: found.gate for found in find_gates()}
RANKFOLD = str(Path(sys.executable).with_name("rankfold"))


@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == ALWAYS else pytest.mark.full) for name in GATES]
)
def test_the_gate_passes_in_rehearsal_or_says_what_it_lacks(name, tmp_path):
    command = [RANKFOLD, "gate", "run", name, "--rehearse", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=650)
    verdict = json.loads((tmp_path / f"{name}.json").read_text())
    lacks = impossible(GATES[name])
    if lacks:
        assert (done.returncode, verdict["verdict"], verdict["reason"]) == (3, "not_run", lacks)
    else:
        assert (done.returncode, verdict["verdict"], verdict["reason"]) == (0, "passed", ""), done.stdout
        assert verdict["mode"] == "rehearsal"
