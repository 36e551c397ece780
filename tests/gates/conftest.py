"""What the tests of gates share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from launch.gates.hosts import TwoHosts
from tests.hosts import two_hosts_or_skip


@pytest.fixture
def pair() -> Iterator[TwoHosts]:
    """Return two hosts with a link between them."""
    with two_hosts_or_skip() as made:
        yield made
