"""The kinds of files that start a job, and what each of them needs to know."""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from launch.render.spec import LaunchSpec
from launch.render.templates import fill
from telemetry.errors import ConfigurationError

__all__ = ["Target", "file_name", "render"]


class Target(str, Enum):
    """What can be rendered."""

    slurm = "slurm"
    pytorchjob = "pytorchjob"
    rayjob = "rayjob"
    job = "job"
    image = "image"


class _Template(NamedTuple):
    path: str
    file_name: str
    needs: tuple[str, ...] = ()


_ON_KUBERNETES: Final = ("image", "claim")
_TEMPLATES: Final = {
    Target.slurm: _Template("slurm/train.sbatch.j2", "{name}.sbatch"),
    Target.pytorchjob: _Template("kubernetes/pytorchjob.yaml.j2", "{name}.pytorchjob.yaml", _ON_KUBERNETES),
    Target.rayjob: _Template("kubernetes/rayjob.yaml.j2", "{name}.rayjob.yaml", _ON_KUBERNETES),
    Target.job: _Template("kubernetes/job.yaml.j2", "{name}.job.yaml", _ON_KUBERNETES),
    Target.image: _Template("images/Dockerfile.j2", "Dockerfile"),
}
_WHY: Final = {
    "image": "the container image that has the script and Rankfold",
    "claim": "the volume claim that the run directory is on; what a pod writes elsewhere is lost with it",
}


def render(spec: LaunchSpec, target: Target) -> str:
    """Return the text of the file that starts ``spec`` on ``target``.

    Raises:
        ConfigurationError: the target needs a field that is None.
        ClusterFilesMissingError: the installation lacks the templates.
        RenderUnavailableError: Jinja is not installed.
    """
    template = _TEMPLATES[target]
    for name in template.needs:
        if getattr(spec, name) is None:
            raise ConfigurationError(f"a {target.value} needs {name}", remedy=f"give --{name}: {_WHY[name]}")
    return fill(template.path, spec)


def file_name(spec: LaunchSpec, target: Target) -> str:
    """Return how the file is called."""
    return _TEMPLATES[target].file_name.format(name=spec.name)
