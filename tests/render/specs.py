"""Specs of jobs, plain ones and ones with values that shells, YAML and Kubernetes would read as something else."""

from __future__ import annotations

from typing import Any

from launch.render import LaunchSpec

__all__ = ["NODES", "SPECS", "make_spec"]

NODES = (1, 2, 64)

ODD_WORDS = (
    "",
    " ",
    "two words",
    "it's",
    'say "no"',
    "$HOME",
    "$(hostname)",
    "$$",
    "$$(JOB_UID)",
    "`id`",
    "${X}",
    "no",
    "on",
    "~",
    "null",
    "1e3",
    "0x10",
    "1_000",
    "2001-01-01",
    "12:30:45",
    "- a",
    "#x",
    "a: b",
    "a #b",
    "*",
    "&a",
    "!x",
    "%x",
    "@x",
    "{{ x }}",
    "{% x %}",
    "\\n",
    "\\",
    "back\\slash\\",
    "tab\there",
    "two\nlines\n",
    "\r",
    "--",
    "--to",
    "-",
    "---",
    "grüße",
    "日本",
    "🔥",
    "\u0085\u2028\u2029\ufeff\x7f\x9f\x01",
    ";|&<>()",
    "!event",
    "a=b",
)
ODD_ENV = {f"ODD_{i}": word for i, word in enumerate(ODD_WORDS)} | {"step": "lower", "job": "case", "code": "9"}


def make_spec(num_nodes: int = 2, **changes: Any) -> LaunchSpec:
    """Return a spec that every target takes."""
    fields = {
        "name": "exp1",
        "num_nodes": num_nodes,
        "to": "/shared/runs/exp1",
        "script": "train.py",
        "arguments": ("--lr", "1e-3"),
        "image": "registry.example/team/train:1",
        "claim": "shared-data",
    }
    return LaunchSpec(**{**fields, **changes})


SPECS = {
    "plain": {},
    "odd": {
        "name": "no",
        "to": "/shared/it's a $HOME/{{ run }}: é #1",
        "script": 'src dir/$train "it\'s".py',
        "arguments": ODD_WORDS,
        "env": ODD_ENV,
        "claim": "1e3",
        "namespace": "123",
    },
    "cpu": {"gpus_per_node": 0, "ranks_per_node": 4},
    "full": {
        "gpus_per_node": 4,
        "cpus_per_node": 48,
        "memory_gib": 256,
        "shm_gib": 64,
        "time_limit_min": 1440,
        "partition": "gpu-long",
        "account": "team_1",
        "qos": "high",
        "network_interface": "eth0",
        "rdma_resource": "rdma/hca_shared_devices_a",
        "rdma_count": 4,
        "env": {"NCCL_DEBUG": "WARN", "GLOO_SOCKET_IFNAME": "eth1"},
    },
    "legs": {"num_legs": 5, "time_limit_min": 60},
}
