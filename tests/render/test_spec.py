"""A spec is checked where it is made, and says what is wrong with it and what would be right."""

import pytest

from launch.render import LaunchSpec, Target, render
from telemetry.errors import ConfigurationError
from tests.render.specs import SPECS, make_spec


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "Exp1"}, "name is 'Exp1'"),
        ({"name": "exp_1"}, "name is 'exp_1'"),
        ({"name": "1exp"}, "name is '1exp'"),
        ({"name": "exp-"}, "name is 'exp-'"),
        ({"name": ""}, "name is ''"),
        ({"name": "a" * 48}, "name is 'aaa"),
        ({"name": "exp\n"}, "name is"),
        ({"num_nodes": 0}, "num_nodes is 0"),
        ({"gpus_per_node": -1}, "gpus_per_node is -1"),
        ({"gpus_per_node": 8, "ranks_per_node": 4}, "8 GPUs and 4 ranks"),
        ({"gpus_per_node": 0, "ranks_per_node": 0}, "ranks_per_node is 0"),
        ({"memory_gib": 16, "shm_gib": 16}, "memory_gib is 16, and shm_gib is 16"),
        ({"port": 80}, "port is 80"),
        ({"port": 65536}, "port is 65536"),
        ({"max_restarts": -1}, "max_restarts is -1"),
        ({"max_requeues": -1}, "max_requeues is -1"),
        ({"grace_s": 0}, "grace_s is 0"),
        ({"time_limit_min": 1}, "time_limit_min is 1, and the ranks are told 90 s before"),
        ({"num_legs": 1}, "num_legs is 1"),
        ({"partition": "gpu --wait"}, "partition is 'gpu --wait'"),
        ({"account": "a\n#SBATCH --x"}, "account is"),
        ({"qos": ""}, "qos is ''"),
        ({"image": "my image"}, "image is 'my image'"),
        ({"namespace": "Team"}, "namespace is 'Team'"),
        ({"claim": "data_1"}, "claim is 'data_1'"),
        ({"network_interface": "eth0; ls"}, "network_interface is"),
        ({"rdma_resource": "ib"}, "rdma_resource is 'ib'"),
        ({"to": "runs/exp1"}, "to is 'runs/exp1'"),
        ({"to": "/shared/../etc"}, "to is '/shared/../etc'"),
        ({"to": "/shared/a\nb"}, "to is"),
        ({"to": "/elsewhere/exp1"}, "not on the volume that is mounted at /shared"),
        ({"to": "/shared2/exp1"}, "not on the volume that is mounted at /shared"),
        ({"script": ""}, "the script is ''"),
        ({"script": "-m"}, "the script is '-m'"),
        ({"arguments": ("a\0b",)}, r"the command has 'a\\x00b'"),
        ({"arguments": ("\udcff",)}, "the command has"),
        ({"env": {"A-B": "1"}}, "'A-B' is no name of a variable"),
        ({"env": {"A": "\udcff"}}, "the variable A is"),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_a_remedy(changes, message):
    with pytest.raises(ConfigurationError, match=message) as refused:
        make_spec(**changes)
    assert refused.value.remedy


def test_ranks_are_gpus_where_there_are_gpus():
    assert make_spec(gpus_per_node=4).num_ranks_per_node == 4
    assert make_spec(gpus_per_node=0).num_ranks_per_node == 1
    assert make_spec(gpus_per_node=0, ranks_per_node=6).num_ranks_per_node == 6


def test_a_variable_that_is_given_has_precedence_over_the_network_interface():
    spec = make_spec(**SPECS["full"])
    assert spec.variables == {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth1", "NCCL_DEBUG": "WARN"}


@pytest.mark.parametrize("target", [Target.pytorchjob, Target.rayjob, Target.job])
@pytest.mark.parametrize("missing", ["image", "claim"])
def test_what_kubernetes_needs_is_asked_for_by_the_name_of_its_option(target, missing):
    with pytest.raises(ConfigurationError, match=f"needs {missing}") as refused:
        render(make_spec(**{missing: None}), target)
    assert f"--{missing}" in refused.value.remedy


def test_slurm_and_the_image_need_neither():
    spec = LaunchSpec("exp1", 1, "/scratch/exp1", "train.py")
    assert "rankfold run" in render(spec, Target.slurm)
    assert "FROM" in render(spec, Target.image)
