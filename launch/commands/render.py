"""``rankfold render``: the file that starts a job on a cluster."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated, Final

import typer

from launch.render.spec import LaunchSpec
from launch.render.targets import Target, file_name, render
from telemetry.errors import ConfigurationError

__all__ = ["render_target"]

_STDOUT: Final = Path("-")
_SLURM: Final = "Slurm"
_KUBERNETES: Final = "Kubernetes"


def render_target(
    target: Annotated[Target, typer.Argument(help="What to write.", show_default=False)],
    command: Annotated[list[str], typer.Argument(metavar="-- SCRIPT [ARGS]", help="What every rank runs.")],
    nodes: Annotated[int, typer.Option(help="Nodes of the job.", show_default=False)],
    to: Annotated[str, typer.Option(help="Run directory, absolute, on storage of all nodes.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder to write into; - prints.")] = Path(),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print, and write nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
    name: Annotated[str | None, typer.Option(help="Of the job; the last part of --to by default.")] = None,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of a node, one a rank; 0 trains on CPUs.")] = 8,
    ranks_per_node: Annotated[int | None, typer.Option(help="Ranks of a node without GPUs; 1 by default.")] = None,
    cpus_per_node: Annotated[int | None, typer.Option(help="CPUs of a node.")] = None,
    memory_gib: Annotated[int | None, typer.Option(help="Memory of a node.")] = None,
    time_limit_min: Annotated[int | None, typer.Option(help="Minutes that the job may take.")] = None,
    grace_s: Annotated[int, typer.Option(help="Seconds that ranks have to end when they are told to.")] = 60,
    max_restarts: Annotated[int, typer.Option(help="Times that ranks are started again on their nodes.")] = 3,
    max_requeues: Annotated[int, typer.Option(help="Times that the scheduler starts a job or pod again.")] = 10,
    port: Annotated[int, typer.Option(help="Of the rendezvous, on the first node.")] = 29400,
    network_interface: Annotated[str | None, typer.Option(help="For NCCL and gloo, such as eth0.")] = None,
    env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the ranks; repeat it.")] = None,
    partition: Annotated[str | None, typer.Option(rich_help_panel=_SLURM)] = None,
    account: Annotated[str | None, typer.Option(rich_help_panel=_SLURM)] = None,
    qos: Annotated[str | None, typer.Option(rich_help_panel=_SLURM)] = None,
    legs: Annotated[
        int | None,
        typer.Option(rich_help_panel=_SLURM, help="Array of this many legs, one after the other, instead of requeues."),
    ] = None,
    image: Annotated[str | None, typer.Option(rich_help_panel=_KUBERNETES, help="Container image.")] = None,
    claim: Annotated[
        str | None, typer.Option(rich_help_panel=_KUBERNETES, help="Volume claim with the run directory.")
    ] = None,
    mount_path: Annotated[
        str, typer.Option(rich_help_panel=_KUBERNETES, help="Where the volume is mounted.")
    ] = "/shared",
    namespace: Annotated[str, typer.Option(rich_help_panel=_KUBERNETES)] = "default",
    shm_gib: Annotated[
        int | None, typer.Option(rich_help_panel=_KUBERNETES, help="Size of /dev/shm; as much as there is by default.")
    ] = None,
    rdma: Annotated[
        str | None, typer.Option(rich_help_panel=_KUBERNETES, help="Device resource and count, such as rdma/ib=8.")
    ] = None,
) -> None:
    """Write the file that starts a job on a cluster: Slurm, Kubernetes, KubeRay, or an image for them.

    slurm: a script for sbatch. pytorchjob: for Kubeflow's training operator. rayjob: for KubeRay, with a script that
    runs Ray Train. job: an indexed Job of Kubernetes itself. image: a Dockerfile.
    """
    rdma_resource, _, rdma_count = (rdma or "").partition("=")
    spec = LaunchSpec(
        name=PurePosixPath(to).name if name is None else name,
        num_nodes=nodes,
        to=to,
        script=command[0],
        arguments=tuple(command[1:]),
        gpus_per_node=gpus_per_node,
        ranks_per_node=ranks_per_node,
        cpus_per_node=cpus_per_node,
        memory_gib=memory_gib,
        shm_gib=shm_gib,
        port=port,
        max_restarts=max_restarts,
        max_requeues=max_requeues,
        grace_s=grace_s,
        time_limit_min=time_limit_min,
        num_legs=legs,
        partition=partition,
        account=account,
        qos=qos,
        image=image,
        namespace=namespace,
        claim=claim,
        mount_path=mount_path,
        network_interface=network_interface,
        rdma_resource=rdma_resource or None,
        rdma_count=_count(rdma_count),
        env=dict(_pair(one) for one in env or ()),
    )
    text = render(spec, target)
    if dry_run or out == _STDOUT:
        typer.echo(text, nl=False)
    else:
        typer.echo(_write(out / file_name(spec, target), text, force))


def _count(text: str) -> int:
    if text and not text.isdecimal():
        raise typer.BadParameter(f"--rdma has the count {text!r}; write RESOURCE=NUMBER")
    return int(text or 1)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"--env is {text!r}; write NAME=VALUE")
    return name, value


def _write(path: Path, text: str, force: bool) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigurationError(
            f"{path} is there already", remedy="give another --out, or --force to write over it"
        ) from error
    return path
