"""What the doctors of several nodes find when they compare them."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launch.checks import Check
from launch.clocks import offset_to
from launch.nodes import Meeting, check_nodes
from telemetry.errors import ConfigurationError

VERSIONS = {"rankfold": "1.0", "torch": "2.13.0", "numpy": "2.4"}


class Node:
    """One node of a meeting that takes place in threads; what is not given is as on all others."""

    def __init__(self, *, ahead_s: float = 0.0, run: Path | None = None, **versions: str) -> None:
        self.clock = lambda: time.time() + ahead_s
        self.run = run
        self.versions = {**VERSIONS, **versions}


def free_endpoint() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def meet(*nodes: Node | None, timeout_s: float = 30.0) -> list[dict[str, Check] | None]:
    """Let the doctors of all nodes that are there meet, and return what each found."""
    endpoint = free_endpoint()

    def visit(place: int) -> dict[str, Check] | None:
        node = nodes[place]
        if node is None:
            return None
        meeting = Meeting(place, len(nodes), endpoint, timeout_s)
        return {check.name: check for check in check_nodes(meeting, node.versions, node.run, node.clock)}

    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(visit, range(len(nodes)), timeout=90))


def test_nodes_that_are_alike_are_sound_and_all_of_them_say_the_same(tmp_path):
    found = meet(*[Node(run=tmp_path) for _ in range(3)])
    assert found[0] == found[1] == found[2]
    assert {check.state for check in found[0].values()} == {"ok"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ahead_s", [2.5, -2.5])
def test_a_clock_that_is_off_is_named_with_how_much_and_which_way(ahead_s):
    found = meet(Node(), Node(ahead_s=ahead_s), Node())
    (check,) = {checks["clocks of the nodes"] for checks in found}
    assert check.state == "warning"
    assert f"{socket.gethostname()} by {ahead_s:+.1f}" in check.found
    assert check.found.count(" by ") == 1


def test_the_clock_of_another_is_measured_within_what_the_answer_took():
    measured = offset_to(lambda: time.time() + 7.0)
    assert abs(measured.offset_s - 7.0) <= measured.uncertainty_s + 1e-3


@pytest.mark.parametrize(("package", "state"), [("torch", "failed"), ("numpy", "warning")])
def test_versions_that_differ_are_named_by_node(package, state):
    found = meet(Node(), Node(**{package: "9.9"}))
    check = found[0][f"{package} on the nodes"]
    assert check.state == state
    assert "9.9 on" in check.found
    assert VERSIONS[package] in check.found


def test_a_folder_that_another_node_does_not_see_is_pointed_out(tmp_path):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    found = meet(Node(run=tmp_path / "here"), Node(run=tmp_path / "there"))
    assert found[1]["shared storage"].state == "warning"


def test_the_nodes_that_do_not_come_are_named_on_all_that_do():
    found = meet(Node(), None, Node(), None, timeout_s=2.0)
    for checks in (found[0], found[2]):
        assert checks["nodes"].state == "failed"
        assert "2 of 4 nodes did not come within 2 s: 1, 3" in checks["nodes"].found


def test_without_the_first_node_the_others_say_where_they_looked_for_it():
    found = meet(None, Node(), timeout_s=1.0)
    assert found[1]["nodes"].state == "failed"
    assert "no store at 127.0.0.1:" in found[1]["nodes"].found


@pytest.mark.parametrize("meeting", [Meeting(0, 2, ""), Meeting(0, 2, "host"), Meeting(2, 2, "host:1")])
def test_a_meeting_that_cannot_be_is_refused(meeting):
    with pytest.raises(ConfigurationError, match="node"):
        check_nodes(meeting, VERSIONS, None)


def test_two_doctors_on_two_hosts_find_each_other(hosts):
    rankfold = str(Path(sys.executable).with_name("rankfold"))
    words = ["timeout", "-k", "5", "90", rankfold, "doctor", "--nnodes", "2"]
    words += ["--rdzv-endpoint", f"{hosts.first.name}:29411"]
    started = [
        host.start([*words, "--node-rank", str(node)], stdout=subprocess.PIPE)
        for node, host in enumerate((hosts.first, hosts.second))
    ]
    for doctor in started:
        output = doctor.communicate(timeout=100)[0].decode()
        assert f"nodes: 2: {hosts.first.name}, {hosts.second.name}" in output
        assert "versions on the nodes: equal" in output
