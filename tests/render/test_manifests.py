"""The manifests are what the APIs take, and every word of the job arrives as it was given."""

import copy
import os
import shlex
import subprocess

import pytest
import yaml

from aggregator.ray_actor.destination import RayDestination
from launch.render import Target, render
from tests.render.manifests import expanded, load, problems
from tests.render.specs import NODES, SPECS, make_spec

KINDS = {Target.job: {"Service", "Job"}, Target.pytorchjob: {"PyTorchJob"}, Target.rayjob: {"RayJob"}}
DEADLINE_S = 30
UID = "0c9b8ecd-6ff0-4f0c-9f2c-5d0f7a0c4a7e"


def pods_of(objects):
    """Yield number and template of the pods of the ranks."""
    if "Job" in objects:
        spec = objects["Job"]["spec"]
        yield spec["completions"], spec["template"]
    elif "PyTorchJob" in objects:
        for replica in objects["PyTorchJob"]["spec"]["pytorchReplicaSpecs"].values():
            yield replica["replicas"], replica["template"]
    else:
        for group in objects["RayJob"]["spec"]["rayClusterSpec"]["workerGroupSpecs"]:
            yield group["replicas"], group["template"]


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("num_nodes", NODES)
@pytest.mark.parametrize("name", SPECS)
def test_the_api_takes_it_and_it_asks_for_the_nodes_of_the_job(target, num_nodes, name):
    spec = make_spec(num_nodes, **SPECS[name])
    objects = load(render(spec, target))
    assert set(objects) == KINDS[target]
    for one in objects.values():
        assert problems(one) == []
        assert (one["metadata"]["name"], one["metadata"]["namespace"]) == (spec.name, spec.namespace)
    pods = list(pods_of(objects))
    assert sum(number for number, _ in pods) == num_nodes
    for _, pod in pods:
        container = pod["spec"]["containers"][0]
        variables = {one["name"]: expanded(one["value"], {}) for one in container.get("env", []) if "value" in one}
        assert variables == spec.variables
        assert pod["spec"]["terminationGracePeriodSeconds"] >= spec.grace_s + 30
        assert container["image"] == spec.image
        assert {"name": "shared", "mountPath": spec.mount_path} in container["volumeMounts"]
        assert {"name": "shared", "persistentVolumeClaim": {"claimName": spec.claim}} in pod["spec"]["volumes"]
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        shm = next(volume for volume in pod["spec"]["volumes"] if volume["name"] == "shm")["emptyDir"]
        assert shm == {"medium": "Memory", **({"sizeLimit": f"{spec.shm_gib}Gi"} if spec.shm_gib else {})}
        limits = container["resources"]["limits"]
        assert limits.get("nvidia.com/gpu") == (str(spec.gpus_per_node) if spec.gpus_per_node else None)
        assert limits.get("memory") == (f"{spec.memory_gib}Gi" if spec.memory_gib else None)
        assert limits.get("cpu") == (str(spec.cpus_per_node) if spec.cpus_per_node else None)
        assert limits.get(spec.rdma_resource) == (str(spec.rdma_count) if spec.rdma_resource else None)


def program(path, first=""):
    """Write one that prints its words, each with a NUL after it."""
    path.write_text(f"#!/bin/sh\n{first}\n" + 'for word in "$@"; do printf "%s\\0" "$word"; done\n')
    path.chmod(0o755)


def common_options(spec):
    return {
        "--to": spec.to,
        "--grace-s": str(spec.grace_s),
        "--nnodes": str(spec.num_nodes),
        "--nproc-per-node": str(spec.num_ranks_per_node),
        "--max-restarts": str(spec.max_restarts),
    }


def split(words):
    """Return options and the script with its arguments."""
    end = words.index("--")
    return dict(zip(words[:end:2], words[1:end:2], strict=True)), words[end + 1 :]


@pytest.mark.parametrize("num_nodes", NODES)
@pytest.mark.parametrize("name", SPECS)
def test_pods_of_a_pytorchjob_run_the_command_and_meet_at_the_master_of_the_operator(num_nodes, name):
    spec = make_spec(num_nodes, **SPECS[name])
    (job,) = load(render(spec, Target.pytorchjob)).values()
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == ({"Master"} if num_nodes == 1 else {"Master", "Worker"})
    of_operator = {"MASTER_ADDR": f"{spec.name}-master-0", "MASTER_PORT": str(spec.port), "JOB_UID": "wrong"}
    for replica in replicas.values():
        container = replica["template"]["spec"]["containers"][0]
        assert container["command"] == ["rankfold", "run"]
        options, command = split([expanded(word, of_operator) for word in container["args"]])
        assert command == list(spec.command)
        assert options == {
            **common_options(spec),
            "--job": f"pytorchjob-{spec.namespace}-{spec.name}",
            "--rdzv-endpoint": f"{spec.name}-master-0:29400",
        }
    assert job["spec"]["runPolicy"]["backoffLimit"] == 10 * num_nodes


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("index", [0, 3])
def test_a_pod_of_an_indexed_job_becomes_rankfold_run_and_pod_0_alone_is_the_host(name, index, tmp_path):
    spec = make_spec(64, **SPECS[name])
    container = load(render(spec, Target.job))["Job"]["spec"]["template"]["spec"]["containers"][0]
    variables = {one["name"]: expanded(one.get("value", UID), {}) for one in container["env"]}
    words = [expanded(word, variables) for word in container["command"] + container["args"]]
    program(tmp_path / "rankfold", "echo $$")
    environment = {
        **variables,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "JOB_COMPLETION_INDEX": str(index),
    }
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE) as process:
        printed, _ = process.communicate(timeout=DEADLINE_S)
    pid, _, passed = printed.decode().partition("\n")
    assert int(pid) == process.pid, "signals would stop at the shell"
    verb, *arguments = passed.split("\0")[:-1]
    options, command = split(arguments)
    assert verb == "run"
    assert command == list(spec.command)
    assert options == {
        **common_options(spec),
        "--job": UID,
        "--rdzv-endpoint": f"{spec.name}-0.{spec.name}:29400",
        "--rdzv-conf": f"is_host={'true' if index == 0 else 'false'}",
    }


def test_the_pods_of_an_indexed_job_have_names_in_the_service_before_they_are_ready():
    objects = load(render(make_spec(2), Target.job))
    service, job = objects["Service"], objects["Job"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}


def test_the_job_ends_at_what_the_doctor_finds_and_does_not_count_disruptions():
    spec = load(render(make_spec(2), Target.job))["Job"]["spec"]
    doctor, disruption = spec["podFailurePolicy"]["rules"]
    names = [one["name"] for one in spec["template"]["spec"]["initContainers"]]
    assert (doctor["action"], doctor["onExitCodes"]["values"]) == ("FailJob", [3])
    assert doctor["onExitCodes"]["containerName"] in names
    assert (disruption["action"], disruption["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")


@pytest.mark.parametrize("target", [Target.job, Target.pytorchjob])
def test_the_doctor_looks_at_the_run_directory_and_the_folder_of_the_script_first(target):
    spec = make_spec(2, **SPECS["odd"])
    for _, pod in pods_of(load(render(spec, target))):
        (doctor,) = pod["spec"]["initContainers"]
        words = [expanded(word, {}) for word in doctor["command"] + doctor["args"]]
        assert words == ["rankfold", "doctor", "--run", spec.to, "--folder", "src dir"]


@pytest.mark.parametrize("name", SPECS)
def test_a_rayjob_runs_the_script_with_its_words_and_says_where_the_record_goes(name, tmp_path):
    spec = make_spec(2, **SPECS[name])
    job = load(render(spec, Target.rayjob))["RayJob"]["spec"]
    program(tmp_path / "python")
    done = subprocess.run(
        job["entrypoint"],
        shell=True,  # as Ray runs it
        capture_output=True,
        timeout=DEADLINE_S,
        env={"PATH": str(tmp_path)},
    )
    assert done.stdout.decode().split("\0")[:-1] == list(spec.command)
    assert shlex.split(job["entrypoint"]) == ["python", *spec.command]
    environment = yaml.safe_load(job["runtimeEnvYAML"])["env_vars"]
    assert "$" not in environment["RANKFOLD_TO"], "Ray would replace it"
    assert RayDestination.parse(environment["RANKFOLD_TO"]) == RayDestination(spec.name, spec.to)


def without(manifest, *path):
    *way, last = path
    for key in way:
        manifest = manifest[key]
    del manifest[last]


def with_value(manifest, value, *path):
    *way, last = path
    for key in way:
        manifest = manifest[key]
    manifest[last] = value


POD = ("spec", "template", "spec")
MASTER = ("spec", "pytorchReplicaSpecs", "Master")
WORKERS = ("spec", "rayClusterSpec", "workerGroupSpecs", 0)


@pytest.mark.parametrize(
    ("target", "breaking"),
    [
        (Target.job, lambda m: with_value(m, 3, "spec", "backofLimit")),
        (Target.job, lambda m: with_value(m, "Never", "spec", "restartPolicy")),
        (Target.job, lambda m: with_value(m, "OnFailure", *POD, "restartPolicy")),
        (Target.job, lambda m: with_value(m, "NonIndexed", "spec", "completionMode")),
        (Target.job, lambda m: without(m, "spec", "backoffLimitPerIndex")),
        (Target.job, lambda m: with_value(m, "TerminatingOrFailed", "spec", "podReplacementPolicy")),
        (Target.job, lambda m: without(m, *POD, "containers", 0, "image")),
        (Target.job, lambda m: with_value(m, 3, *POD, "containers", 0, "args", 0)),
        (Target.job, lambda m: with_value(m, True, *POD, "containers", 0, "env", 0, "value")),
        (Target.job, lambda m: with_value(m, 8, *POD, "containers", 0, "resources", "limits", "nvidia.com/gpu")),
        (Target.job, lambda m: with_value(m, None, *POD, "containers", 0, "resources", "limits")),
        (Target.job, lambda m: with_value(m, [0], "spec", "podFailurePolicy", "rules", 0, "onExitCodes", "values")),
        (Target.job, lambda m: with_value(m, "batch/v1beta1", "apiVersion")),
        (Target.job, lambda m: with_value(m, 1, "metadata", "name")),
        (Target.job, lambda m: with_value(m, {"medium": "memory"}, *POD, "volumes", 1, "emptyDir")),
        (Target.pytorchjob, lambda m: with_value(m, 8, "spec", "nprocPerNode")),
        (Target.pytorchjob, lambda m: with_value(m, 2, "spec", "backoffLimit")),
        (Target.pytorchjob, lambda m: with_value(m, 2, *MASTER, "replicas")),
        (Target.pytorchjob, lambda m: with_value(m, "Retry", *MASTER, "restartPolicy")),
        (Target.pytorchjob, lambda m: with_value(m, "Never", *MASTER, "template", "spec", "restartPolicy")),
        (Target.pytorchjob, lambda m: with_value(m, "main", *MASTER, "template", "spec", "containers", 0, "name")),
        (Target.pytorchjob, lambda m: with_value(m, {}, "spec", "pytorchReplicaSpecs", "Workers")),
        (Target.rayjob, lambda m: with_value(m, "HttpMode", "spec", "submissionMode")),
        (Target.rayjob, lambda m: with_value(m, {}, "spec", "runtimeEnv")),
        (Target.rayjob, lambda m: with_value(m, False, "spec", "shutdownAfterJobFinishes")),
        (Target.rayjob, lambda m: without(m, *WORKERS, "maxReplicas")),
        (
            Target.rayjob,
            lambda m: with_value(m, 0, "spec", "rayClusterSpec", "headGroupSpec", "rayStartParams", "num-cpus"),
        ),
        (Target.rayjob, lambda m: with_value(m, "a" * 48, "metadata", "name")),
    ],
)
def test_a_manifest_that_is_broken_is_refused(target, breaking):
    objects = load(render(make_spec(2, **SPECS["full"]), target))
    sound = objects.get("Job") or objects.get("PyTorchJob") or objects["RayJob"]
    broken = copy.deepcopy(sound)
    breaking(broken)
    assert problems(sound) == []
    assert problems(broken)


def test_a_service_that_is_broken_is_refused():
    service = load(render(make_spec(2), Target.job))["Service"]
    with_value(service, True, "spec", "publishNotReadyAdresses")
    assert problems(service)
