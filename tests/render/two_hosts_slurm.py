"""Programs that stand in for Slurm where its nodes are two real hosts: tasks run on them, and nothing else is played.

``HOSTS`` has the names of the hosts, ``FAKES`` a folder: ``calls`` gets one line for each call of scontrol that changes
something.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

BECOME = "import os, socket, sys; socket.sethostname(sys.argv[1]); os.execvp(sys.argv[2], sys.argv[2:])"


def srun(words: list[str]) -> int:
    """Run the command on every host, pass SIGTERM on, and end with the highest code."""
    first = next(i for i, word in enumerate(words) if not word.startswith("--"))
    tasks = []
    for node, host in enumerate(os.environ["HOSTS"].split()):
        inside = ["ip", "netns", "exec", host, "unshare", "--uts", sys.executable, "-c", BECOME, host]
        environ = {**os.environ, "SLURM_NODEID": str(node)}
        tasks.append(subprocess.Popen([*inside, *words[first:]], env=environ))
    signal.signal(signal.SIGTERM, lambda *_: [task.send_signal(signal.SIGTERM) for task in tasks])
    return max(task.wait(150) % 256 for task in tasks)


def scontrol(words: list[str]) -> int:
    """Name the hosts, or note what was asked for."""
    if words[:2] == ["show", "hostnames"]:
        print("\n".join(os.environ["HOSTS"].split()))
    else:
        with Path(os.environ["FAKES"], "calls").open("a") as file:
            file.write(" ".join(words) + "\n")
    return 0


if __name__ == "__main__":
    programs = {"srun": srun, "scontrol": scontrol, "squeue": lambda _: print("RUNNING") or 0}
    sys.exit(programs[Path(sys.argv[0]).name](sys.argv[1:]))
