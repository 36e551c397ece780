"""Two hosts on one machine see each other over a link that drops in silence while it is cut, and leave nothing."""

import os
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch.gates import NotRunError
from launch.gates.hosts import two_hosts

DEADLINE_S = 30

ECHO = """
import socket
server = socket.create_server(("", 4711))
print("ready", flush=True)
while True:
    peer, _ = server.accept()
    with peer:
        while word := peer.recv(64):
            peer.sendall(word)
"""
# Prints a line for whatever comes back, on one connection for all its life.
CALL = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 4711), timeout=10)
peer.settimeout(60)
while True:
    peer.sendall(b"word")
    peer.recv(64)
    print("heard", flush=True)
    time.sleep(0.02)
"""
REACH = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 4711), timeout=1).close()
    print("reached")
except OSError as error:
    print(type(error).__name__)
"""


def start(host, script, *arguments):
    return host.start([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE)


def next_line(process, within_s=DEADLINE_S):
    """Return a line of its output, "" if none comes."""
    if not select.select([process.stdout], [], [], within_s)[0]:
        return ""
    # One byte at a time, so that nothing is kept where select cannot see it.
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(process.stdout.fileno(), 1)):
        line += byte
    return line.decode().strip()


def reach(host, name):
    return start(host, REACH, name).communicate(timeout=DEADLINE_S)[0].decode().strip()


def serve(host):
    server = start(host, ECHO)
    assert next_line(server) == "ready"
    return server


def test_a_cut_link_drops_in_silence_and_an_open_connection_goes_on_when_it_is_mended(pair):
    serve(pair.second)
    caller = start(pair.first, CALL, pair.second.name)
    assert next_line(caller) == "heard"
    pair.cut()
    while next_line(caller, within_s=1.0):
        continue
    # Nobody refuses and nothing is reported as unreachable: it takes until somebody's deadline.
    assert reach(pair.first, pair.second.name) == "TimeoutError"
    pair.mend()
    assert next_line(caller) == "heard"


def test_each_host_has_its_own_name_that_both_resolve_and_two_pairs_do_not_meet(pair):
    show_name = "import socket; print(socket.gethostname(), socket.gethostbyname(socket.gethostname()))"
    with two_hosts() as other:
        for host in (pair.first, pair.second, other.first, other.second):
            shown = start(host, show_name).communicate(timeout=DEADLINE_S)[0].decode().split()
            assert shown == [host.name, host.address]
        serve(pair.second)
        assert reach(pair.first, pair.second.name) == "reached"
        assert reach(other.first, other.second.name) == "ConnectionRefusedError"


def test_processes_that_left_their_session_end_with_the_hosts_and_nothing_stays(pair):
    deaf = "import os, signal, time; signal.signal(15, signal.SIG_IGN); os.setsid(); "
    deaf += "print('up', flush=True); time.sleep(99)"
    spawn = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {deaf!r}])"
    with two_hosts() as other:
        parent = start(other.first, spawn)
        assert next_line(parent) == "up"
    # The pipe is at its end once the last process that holds it is gone.
    assert next_line(parent) == ""
    assert parent.wait(DEADLINE_S) == -9
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=DEADLINE_S).stdout
    assert other.first.name.rpartition("-")[0] not in left
    assert not [entry for entry in Path("/etc/netns").iterdir() if entry.name.startswith(other.router[:-1])]


@pytest.mark.parametrize(
    ("module", "name", "answer", "reason"),
    [(os, "geteuid", 1000, "needs root"), (shutil, "which", None, "ip is not there")],
)
def test_where_it_is_impossible_it_says_why(monkeypatch, module, name, answer, reason):
    monkeypatch.setattr(module, name, lambda *_: answer)
    with pytest.raises(NotRunError, match=reason.replace("needs", "need")), two_hosts():
        pass
