"""What this installation has, and what of it would keep a job from its record."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

import telemetry
from launch.checks import Check, check_clock, check_imports, check_layout, check_ray, check_storage
from launch.nodes import Meeting, check_nodes
from telemetry.summary import available_backends, backend_name

__all__ = ["Installation", "inspect_installation"]

_PACKAGES = ("torch", "numpy", "pyarrow", "tensorboard", "ray", "wandb", "mlflow-skinny", "comet-ml", "plotly")


@dataclass(frozen=True)
class Installation:
    """What was found.

    Attributes:
        python, packages: versions; a package that is not installed is None.
        location: the folder that the packages are imported from.
        backend: what reduces tensors on the CPU; backends: all that work here, the fastest first.
        devices: name of each CUDA device; their tensors are reduced by ATen.
        collectives: backends of ``torch.distributed`` that this torch has, each with its version.
        checks: of imports, clock, Ray, storage, layout and the other nodes.
        advice: what to do about the installation itself, one sentence each.
    """

    python: str
    packages: dict[str, str | None]
    location: str
    backend: str
    backends: tuple[str, ...]
    devices: tuple[str, ...]
    collectives: dict[str, str]
    checks: tuple[Check, ...]
    advice: tuple[str, ...]

    @property
    def is_sound(self) -> bool:
        """Whether nothing that was looked at has failed."""
        return all(check.state != "failed" for check in self.checks)

    def to_wire(self) -> dict[str, object]:
        """Return the fields as a JSON-serialisable dictionary."""
        return {**asdict(self), "sound": self.is_sound}


def inspect_installation(
    folder: Path | None = None,
    run_directory: Path | None = None,
    sizes: Mapping[str, int] | None = None,
    world_size: int | None = None,
    meeting: Meeting | None = None,
) -> Installation:
    """Look at this environment; starts nothing, and writes only to try the storage of a run.

    Args:
        folder: of the training script, the working directory if None.
        run_directory: where a run is to be; its storage is not looked at if None.
        sizes: axes of a layout; world_size: ranks of the job, None if unknown.
        meeting: where the doctors of all nodes compare them; None for this node alone.

    Raises:
        ConfigurationError: the meeting cannot be as it was described.
    """
    backends = available_backends()
    advice = []
    if backends == ("aten",):
        advice.append(
            "the C kernel is not built, and tensors on the CPU are reduced many times slower: "
            "install a C compiler, then pip install --force-reinstall --no-deps rankfold"
        )
    packages = {name: _version(name) for name in ("rankfold", *_PACKAGES)}
    versions = {**packages, "python": platform.python_version(), "backend": backend_name("cpu")}
    return Installation(
        python=platform.python_version(),
        packages=packages,
        location=str(Path(telemetry.__file__).resolve().parent.parent),
        backend=backend_name("cpu"),
        backends=backends,
        devices=tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())),
        collectives=_collectives(),
        checks=(
            *check_imports(folder or Path.cwd()),
            check_clock(),
            *check_ray(),
            *(check_storage(run_directory) if run_directory is not None else ()),
            *((check_layout(sizes, world_size),) if sizes is not None else ()),
            *(check_nodes(meeting, versions, run_directory) if meeting is not None else ()),
        ),
        advice=tuple(advice),
    )


def _collectives() -> dict[str, str]:
    if not dist.is_available():
        return {}
    versions = {}
    if dist.is_gloo_available():
        versions["gloo"] = f"of torch {torch.__version__}"
    if dist.is_nccl_available():
        versions["nccl"] = ".".join(map(str, cast(Any, torch.cuda.nccl).version()))
    if dist.is_mpi_available():
        versions["mpi"] = f"of torch {torch.__version__}"
    return versions


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
