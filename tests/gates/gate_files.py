"""Gate files for tests of what is around a gate: one that measures what it is told, one whose ranks never end."""

from __future__ import annotations

from pathlib import Path

__all__ = ["write_endless", "write_gate"]

GATE = """
from launch.gates import Gate, Limit, Needs, NotRunError

GATE = Gate(
    name={name!r},
    purpose="the number is small",
    procedure="A number is returned.",
    needs=Needs(gpus_per_node={gpus}, modules={modules!r}),
    limits=(Limit("number", "at most", 5.0, "s"), Limit("cost", "at most", 1.0, on_gpu_only=True)),
    rehearsal="that it is small here",
)
"""
RETURNS = """
def run(trial):
    {body}
"""
ENDLESS = """
def run(trial):
    return trial.run_ranks()


if __name__ == "__main__":
    import time
    print("ready", flush=True)
    time.sleep(600)
"""


def write_gate(folder: Path, name: str, body: str, *, gpus: int = 0, modules: dict[str, str] | None = None) -> None:
    """Write a gate whose ``run(trial)`` is ``body``."""
    text = GATE.format(name=name, gpus=gpus, modules=modules or {}) + RETURNS.format(body=body)
    _write(folder, name, text)


def write_endless(folder: Path, name: str) -> None:
    """Write a gate whose rank says ``ready`` in its log and then sleeps."""
    _write(folder, name, GATE.format(name=name, gpus=0, modules={}) + ENDLESS)


def _write(folder: Path, name: str, text: str) -> None:
    (folder / "gates").mkdir(exist_ok=True)
    (folder / "gates" / f"{name.replace('-', '_')}.py").write_text(text)
