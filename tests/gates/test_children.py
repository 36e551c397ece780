"""A child of a gate is heard to its end, killed when it is late, and its errors do not pass in silence."""

import os
import signal
import time

import pytest

from launch.gates.children import Child
from telemetry.errors import WriterFencedError
from tests.ranks import FORKSERVER  # noqa: F401  the server of all tests that fork has loaded torch

DEADLINE_S = 60


def count(number, tell):
    for i in range(number):
        tell(i)


def never_end(tell):
    tell("begun")
    while True:
        time.sleep(1)


def tell_without_end(tell):
    while True:
        tell(os.getpid())


def be_refused(tell):
    raise WriterFencedError("another has continued", remedy="stop")


def fail(tell):
    raise ZeroDivisionError("the gate's own")


def test_it_tells_everything_and_then_nothing():
    child = Child(count, 3)
    assert child.hear(DEADLINE_S) == 0
    assert child.hear_all(DEADLINE_S) == [1, 2]
    assert child.hear(DEADLINE_S) is None


@pytest.mark.parametrize("body", [never_end, tell_without_end])
def test_one_that_does_not_end_is_killed_and_what_it_told_is_kept(body):
    child = Child(body)
    first = child.hear(DEADLINE_S)
    told = child.hear_all(within_s=0.2)
    assert child.process.exitcode == -signal.SIGKILL
    assert first == "begun" or set(told) == {child.process.pid}


def test_our_errors_are_told_by_their_code_and_others_are_raised():
    assert Child(be_refused).hear_all(DEADLINE_S) == ["writer_fenced"]
    with pytest.raises(RuntimeError, match="ZeroDivisionError: the gate's own"):
        Child(fail).hear_all(DEADLINE_S)
