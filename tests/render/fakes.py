"""Programs that stand in for Slurm and for ``rankfold``: each records its words, and does the part the test is about.

One file is copied under the names of all programs. Where one is called, the folder in ``FAKES`` has
``state`` (what squeue prints), ``hosts``, and the files that are written:

- ``calls``: one JSON list a line, ``[program, node, words, variables]``;
- ``ready-NODE``, as soon as a training that waits can be told to end, and ``told-NODE``, one character a signal.

``DOCTOR`` and ``TRAIN`` say how the commands of rankfold end: with a number, or after SIGTERM with the number behind
``wait:``. With ``EARLY_NOTICE`` the script is told to end before it has started anything.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["NAMES", "install"]

NAMES = ("srun", "scontrol", "squeue", "scancel", "rankfold", "python")
FOLDER = Path(os.environ.get("FAKES", "."))
PATIENCE_S = 60.0


def install(folder: Path, *names: str) -> None:
    """Make the programs in a folder that is then put on PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        program = folder / name
        # Without site: a folder of installed packages takes longer to look through than all that is done here.
        program.write_text(f"#!{sys.executable} -IS\n{Path(__file__).read_text()}")
        program.chmod(0o755)


def record(program: str, words: list[str]) -> None:
    """Append a line, in one write."""
    line = json.dumps([program, os.environ.get("SLURM_NODEID"), words, dict(os.environ)])
    with (FOLDER / "calls").open("a") as file:
        file.write(line + "\n")


def srun(words: list[str]) -> int:
    """Run the command once a node, pass SIGTERM on, and end with the highest code."""
    options = [word for word in words if word.startswith("--")]
    first = next(i for i, word in enumerate(words) if not word.startswith("--"))
    num_tasks = next(int(word.partition("=")[2]) for word in options if word.startswith("--ntasks="))
    tasks = [
        subprocess.Popen(words[first:], env={**os.environ, "SLURM_NODEID": str(node)}) for node in range(num_tasks)
    ]
    signal.signal(signal.SIGTERM, lambda *_: [task.send_signal(signal.SIGTERM) for task in tasks])
    (FOLDER / "srun.pid").write_text(str(os.getpid()))
    return max(task.wait(PATIENCE_S) for task in tasks)


def scontrol(words: list[str]) -> int:
    """Name the hosts, or requeue: that ends the script that asks for it, as Slurm does."""
    if words[:2] == ["show", "hostnames"]:
        print((FOLDER / "hosts").read_text())
        if os.environ.get("EARLY_NOTICE"):
            os.kill(os.getppid(), signal.SIGTERM)
    elif words[0] == "requeue":
        (FOLDER / "state").write_text("PENDING")
        os.kill(os.getppid(), signal.SIGTERM)
    return 0


def squeue(words: list[str]) -> int:
    """Print the state of the job, or fail without one as when the controller does not answer."""
    state = FOLDER / "state"
    if not state.exists():
        return 1
    print(state.read_text())
    return 0


def rankfold(words: list[str]) -> int:
    """End as the test has said."""
    how = os.environ["DOCTOR" if words[0] == "doctor" else "TRAIN"]
    kind, _, code = how.rpartition(":")
    if kind == "wait":
        wait_for_signal()
    return int(code)


def wait_for_signal() -> None:
    """Wait for SIGTERM, and then a little for a second one."""
    node = os.environ["SLURM_NODEID"]
    told: list[int] = []

    def on_term(*_: object) -> None:
        told.append(1)
        (FOLDER / f"told-{node}").write_text("x" * len(told))

    signal.signal(signal.SIGTERM, on_term)
    (FOLDER / f"ready-{node}").touch()
    deadline = time.monotonic() + PATIENCE_S
    while not told and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)


def main() -> int:
    """Be the program that this file was called as."""
    program, words = Path(sys.argv[0]).name, sys.argv[1:]
    record(program, words)
    act = {"srun": srun, "scontrol": scontrol, "squeue": squeue, "rankfold": rankfold}.get(program, lambda _: 0)
    return act(words)


if __name__ == "__main__":
    sys.exit(main())
