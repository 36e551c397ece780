"""A supervised child gets our signals, and nothing of it stays behind.

Each test starts a process of its own that supervises, because signals are sent to it. A descendant that is still
there would hold the pipe of standard output open, so that reading it to its end would run into the deadline.
"""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from launch.process import EXIT_LATE, run_supervised

DEADLINE_S = 60

SUPERVISE = """
import os, sys
from launch.process import run_supervised
sys.exit(run_supervised([sys.executable, "-c", sys.argv[1]], env=os.environ, grace_s=float(sys.argv[2])))
"""

POLITE = """
import signal, sys, time
def leave(number, frame):
    print("got", number, flush=True)
    sys.exit(7)
signal.signal(signal.SIGINT, leave)
signal.signal(signal.SIGTERM, leave)
if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
    signal.signal(signal.SIGHUP, leave)
print("ready", flush=True)
time.sleep(600)
"""

# As torchrun does, it puts its worker in a session of its own; as a hung one does, neither listens.
STUBBORN = """
import signal, subprocess, sys, time
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True)
time.sleep(600)
"""


def supervise(child: str, grace_s: float, *prefix: str) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, "-c", SUPERVISE, textwrap.dedent(child), str(grace_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_goes_on_to_the_child_and_names_the_exit(number):
    process = supervise(POLITE, grace_s=DEADLINE_S)
    process.send_signal(number)
    printed, _ = process.communicate(timeout=DEADLINE_S)
    assert printed == f"got {int(number)}\n"
    assert process.returncode == 128 + number


def test_a_job_under_nohup_outlives_its_terminal():
    process = supervise(POLITE, DEADLINE_S, "sh", "-c", 'trap "" HUP; exec "$@"', "sh")
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=DEADLINE_S)
    assert printed == f"got {int(signal.SIGTERM)}\n"
    assert process.returncode == 128 + signal.SIGTERM


def test_a_child_that_takes_longer_than_it_may_is_killed_with_its_descendants():
    assert run_supervised([sys.executable, "-c", STUBBORN], env=os.environ, limit_s=1.0) == EXIT_LATE


def test_a_child_that_ignores_the_signal_is_killed_with_its_descendants():
    process = supervise(STUBBORN, grace_s=0.5)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signal.SIGTERM


def test_a_second_signal_does_not_wait_for_the_grace_period():
    process = supervise(STUBBORN, grace_s=10 * DEADLINE_S)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode > 128


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_of_the_child_is_ours(code):
    assert run_supervised([sys.executable, "-c", f"raise SystemExit({code})"], env=os.environ) == code


def test_the_callers_signal_handlers_are_back_afterwards():
    before = signal.getsignal(signal.SIGTERM)
    run_supervised([sys.executable, "-c", ""], env=os.environ)
    assert signal.getsignal(signal.SIGTERM) is before
