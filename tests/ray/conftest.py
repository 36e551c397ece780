"""One real Ray cluster for all tests of this folder, started by the first that asks for it, stopped after the last."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import pytest

from tests.ray.clusters import Cluster, started_cluster

_HERE = Path(__file__).parent
_running: list[Cluster] = []
_until_the_last_test = ExitStack()


@pytest.fixture
def cluster() -> Cluster:
    """Return a cluster of one node; this process is connected to it."""
    if not _running:
        _running.append(_until_the_last_test.enter_context(started_cluster()))
    return _running[0]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Stop the cluster before tests of other folders run: it takes processes and memory."""
    if nextitem is None or _HERE not in nextitem.path.parents:
        _running.clear()
        _until_the_last_test.close()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Return a name for the run that no other test uses."""
    words = str(request.node.name).replace("[", ".").replace("]", "").replace("_", "-")
    return f"{words[:80]}-{uuid4().hex[:8]}"
