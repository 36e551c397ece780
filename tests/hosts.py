"""Two hosts on this machine for tests; where REQUIRE_NAMESPACES is set, a machine that cannot fails the test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from launch.gates import NotRunError
from launch.gates.hosts import TwoHosts, two_hosts

__all__ = ["two_hosts_or_skip"]


@contextmanager
def two_hosts_or_skip() -> Iterator[TwoHosts]:
    """Set up two hosts with a link between them, as ``two_hosts`` does."""
    with ExitStack() as stack:
        try:
            pair = stack.enter_context(two_hosts())
        except NotRunError as error:
            if os.environ.get("REQUIRE_NAMESPACES"):
                raise
            pytest.skip(str(error))
        yield pair
