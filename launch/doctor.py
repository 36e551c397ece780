"""What this installation has: versions, and the code that reduces tensors on each kind of device."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import telemetry
from telemetry.summary import available_backends, backend_name

__all__ = ["Installation", "inspect_installation"]

_PACKAGES = ("torch", "numpy", "pyarrow", "tensorboard", "ray", "wandb")


@dataclass(frozen=True)
class Installation:
    """What was found.

    Attributes:
        python, packages: versions; a package that is not installed is None.
        location: the folder that the packages are imported from.
        backend: what reduces tensors on the CPU; backends: all that work here, the fastest first.
        devices: name of each CUDA device; their tensors are reduced by ATen.
        advice: what to do about what was found, one sentence each.
    """

    python: str
    packages: dict[str, str | None]
    location: str
    backend: str
    backends: tuple[str, ...]
    devices: tuple[str, ...]
    advice: tuple[str, ...]

    def to_wire(self) -> dict[str, object]:
        """Return the fields as a JSON-serialisable dictionary."""
        return asdict(self)


def inspect_installation() -> Installation:
    """Look at this environment; starts nothing and writes nothing."""
    backends = available_backends()
    advice = []
    if backends == ("aten",):
        advice.append(
            "the C kernel is not built, and tensors on the CPU are reduced many times slower: "
            "install a C compiler, then pip install --force-reinstall --no-deps rankfold"
        )
    return Installation(
        python=platform.python_version(),
        packages={name: _version(name) for name in ("rankfold", *_PACKAGES)},
        location=str(Path(telemetry.__file__).resolve().parent.parent),
        backend=backend_name("cpu"),
        backends=backends,
        devices=tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())),
        advice=tuple(advice),
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
