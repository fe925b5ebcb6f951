"""What `plait manifest` prints is valid, and its pods train as `plait train` does."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

from plait.api.joined_workers import JoinedWorker
from plait.cli import app
from plait.core.errors import InputError
from plait.core.yaml_text import dump_yaml
from plait.jobs.manifest import KINDS, label_of
from plait.jobs.train import train
from plait.schema.job import make_job
from plait.worker import main as worker
from support.world import run_ranks

pytestmark = pytest.mark.usefixtures("forked_commands")

JOB: dict[str, Any] = {
    "name": "My.Job_1",
    "model": "support.training:small_net",
    "data": {"kind": "support.training:digits", "batch_size": 60},
    "optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.9},
    "steps": 4,
    "precision": "float64",
    "device": "cpu",
    "verify": "off",
    "cluster": {"environment": {"MODE": "yes", "RATE": "1e-3"}},
}
NAME = "my-job-1"
HERE = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
}
VERSIONS = {
    "ConfigMap": "v1",
    "PersistentVolumeClaim": "v1",
    "Service": "v1",
    "Job": "batch/v1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "TrainingRuntime": "trainer.kubeflow.org/v1alpha1",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
}
# What an object must have, as far as these manifests use it: a type, a list of one schema, or a choice.
CONTAINER = {
    "name": str,
    "image": str,
    "env": [{"name": str}],
    "volumeMounts": [{"name": str, "mountPath": str}],
}
POD = {"restartPolicy": {"Never"}, "containers": [CONTAINER], "volumes": [{"name": str}]}
INDEXED = {
    "completionMode": {"Indexed"},
    "completions": {2},
    "parallelism": {2},
    "backoffLimit": int,
    "template": {"metadata": {"labels": dict}, "spec": POD},
}
NODE = {"name": {"node"}, "template": {"spec": {"backoffLimit": {0}, "template": {"spec": POD}}}}
SCHEMAS: dict[str, Any] = {
    "ConfigMap": {"data": {"job.yaml": str}},
    "PersistentVolumeClaim": {
        "spec": {"accessModes": [{"ReadWriteMany"}], "resources": {"requests": {"storage": str}}}
    },
    "Service": {"spec": {"clusterIP": {"None"}, "selector": dict, "ports": [{"name": str, "port": int}]}},
    "Job": {"spec": INDEXED},
    "JobSet": {
        "spec": {
            "network": {"enableDNSHostnames": {True}, "subdomain": str},
            "failurePolicy": {"maxRestarts": int},
            "replicatedJobs": [{"name": {"node"}, "replicas": {1}, "template": {"spec": INDEXED}}],
        }
    },
    "TrainingRuntime": {
        "spec": {
            "mlPolicy": {"numNodes": {2}, "torch": dict},
            "template": {"spec": {"failurePolicy": {"maxRestarts": int}, "replicatedJobs": [NODE]}},
        }
    },
    "TrainJob": {
        "spec": {
            "runtimeRef": {"apiGroup": {"trainer.kubeflow.org"}, "kind": {"TrainingRuntime"}, "name": str},
            "trainer": {"image": str, "command": [str], "numNodes": {2}, "numProcPerNode": int},
        }
    },
}


def mismatch(value: Any, schema: Any, path: str = "") -> str:
    """The first way in which `value` is not as `schema` says; empty if there is none."""
    if isinstance(schema, type):
        return "" if isinstance(value, schema) else f"{path}: {value!r}"
    if isinstance(schema, set):
        return "" if value in schema else f"{path}: {value!r}"
    if isinstance(schema, list):
        if not isinstance(value, list) or not value:
            return f"{path}: {value!r}"
        return next(filter(None, (mismatch(v, schema[0], f"{path}[{i}]") for i, v in enumerate(value))), "")
    absent = [key for key in schema if not isinstance(value, dict) or key not in value]
    if absent:
        return f"{path}: no {absent}"
    return next(filter(None, (mismatch(value[k], s, f"{path}.{k}") for k, s in schema.items())), "")


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "job.yaml"
    path.write_text(dump_yaml({**JOB, **changes}))
    return path


def objects_of(path: Path, *words: str) -> dict[str, Any]:
    """The objects that are printed, by kind."""
    done = CliRunner().invoke(app, ["manifest", str(path), "--image", "plait:1", *words])
    assert done.exit_code == 0, done.output
    return {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}


def walk(value: Any, key: str) -> list[Any]:
    """All values of `key` within `value`."""
    if isinstance(value, list):
        return [found for each in value for found in walk(each, key)]
    if not isinstance(value, dict):
        return []
    here = [value[key]] if key in value else []
    return here + [found for each in value.values() for found in walk(each, key)]


def pod_of(objects: dict[str, Any]) -> dict[str, Any]:
    (pod,) = [pod for pod in walk(objects, "spec") if "containers" in pod]
    return pod


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_objects_have_what_kubernetes_asks_for_and_refer_to_each_other(
    tmp_path: Path, kind: str, slots: int
) -> None:
    words = ["--kind", kind, "--nodes", "2", "--slots", str(slots), "--gpus", "2", "--cpus", "4"]
    path = written(tmp_path)
    objects = objects_of(path, *words, "--namespace", "team")
    assert ("TrainJob" if kind == "trainjob" else {"job": "Job", "jobset": "JobSet"}[kind]) in objects
    for each, content in objects.items():
        assert (content["apiVersion"], content["metadata"]["namespace"]) == (VERSIONS[each], "team")
        assert mismatch(content, SCHEMAS[each]) == ""
    labels = [*(each["metadata"]["name"] for each in objects.values()), *walk(objects, "claimName")]
    labels += [each["name"] for each in walk(objects, "containers")[0] + walk(objects, "volumes")[0]]
    assert all(re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", label) for label in labels)
    pod = pod_of(objects)
    (container,) = pod["containers"]
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    assert walk(pod, "claimName") == [objects["PersistentVolumeClaim"]["metadata"]["name"]]
    assert walk(pod["volumes"], "configMap") == [{"name": objects["ConfigMap"]["metadata"]["name"]}]
    # Text that looks like a truth value or a number stays text.
    assert {"name": "MODE", "value": "yes"} in container["env"]
    assert '"1e-3"' in CliRunner().invoke(app, ["manifest", str(path), "--image", "x"]).stdout
    assert walk(objects, "limits") == [{"nvidia.com/gpu": "2"}]
    if kind == "job":
        service = objects["Service"]
        template = objects["Job"]["spec"]["template"]
        assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        assert pod["subdomain"] == service["metadata"]["name"]
        assert service["spec"]["ports"][0]["port"] == container["ports"][0]["containerPort"]
    if kind != "trainjob":
        first = {"job": f"{NAME}-0.{NAME}", "jobset": f"{NAME}-node-0-0.{NAME}"}[kind]
        assert first in [each.get("value") for each in container["env"]]
    else:
        assert objects["TrainJob"]["spec"]["runtimeRef"]["name"] == NAME
        assert "torch" in objects["TrainingRuntime"]["metadata"]["labels"].values()
    listed = CliRunner().invoke(app, ["manifest", str(path), "--image", "plait:1", *words, "--json"])
    assert [each["kind"] for each in json.loads(listed.stdout)["items"]] == list(objects)


def operator_variables(index: int, nodes: int, slots: int, name: str) -> dict[str, str]:
    """What the operator of a TrainJob adds to the container."""
    return {
        "PET_NNODES": str(nodes),
        "PET_NPROC_PER_NODE": str(slots),
        "PET_NODE_RANK": str(index),
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": "29500",
    }


def start_pod(objects: dict[str, Any], index: int, folder: Path, port: int) -> subprocess.Popen[str]:
    """The container of one pod on this host: mounts are folders, and the first pod is on loopback."""
    (container,) = pod_of(objects)["containers"]
    variables = {each["name"]: each.get("value", str(index)) for each in container["env"]}
    if "TrainJob" in objects:
        trainer = objects["TrainJob"]["spec"]["trainer"]
        container = {**container, **trainer}
        variables |= operator_variables(index, trainer["numNodes"], trainer["numProcPerNode"], NAME)
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    for key in variables:
        if "MASTER" in key:
            variables[key] = "127.0.0.1" if key.endswith("ADDR") else str(port)
    command = [word.replace(mounts["files"], str(folder / "files")) for word in container["command"]]
    command = [word.replace(mounts["runs"], str(folder / "runs")) for word in command]
    program = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    return subprocess.Popen(
        [*program[command[0]], *command[1:]],
        env={**os.environ, **variables, **HERE},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def weights(folder: Path) -> dict[str, Any]:
    return load_file(sorted(folder.glob("checkpoints/*/model.safetensors"))[-1])


@pytest.mark.parametrize(
    ("kind", "nodes", "slots"),
    [
        pytest.param("job", 2, 1, marks=pytest.mark.extended),  # as test_five_ways.py does
        pytest.param("jobset", 1, 2, marks=pytest.mark.extended),
        pytest.param("trainjob", 2, 1, marks=pytest.mark.extended),
    ],
)
def test_the_pods_train_as_plait_does_on_two_workers(
    tmp_path: Path, kind: str, nodes: int, slots: int
) -> None:
    path = written(tmp_path)
    objects = objects_of(path, "--kind", kind, "--nodes", str(nodes), "--slots", str(slots))
    (tmp_path / "files").mkdir()
    for name, text in objects["ConfigMap"]["data"].items():
        (tmp_path / "files" / name).write_text(text)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pods = [start_pod(objects, index, tmp_path, port) for index in range(nodes)]
    try:
        printed = [pod.communicate(timeout=90)[0] for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
    assert [pod.returncode for pod in pods] == [0] * nodes, printed
    run = train(make_job({**JOB, "run_dir": str(tmp_path / "here"), "parallel": {"workers": 2}})).run
    here, there = weights(Path(run)), weights(tmp_path / "runs" / NAME)
    assert here.keys() == there.keys()
    assert all(bool((here[name] == there[name]).all()) for name in here)


def again(rank: int, path: str, folder: str, stops: bool) -> int:
    """The status of a worker that is started as in a pod; with `stops` rank 1 is told to end after a step."""
    asked = []

    def stop_requested(self: JoinedWorker) -> bool:
        asked.append(None)
        return stops and rank == 1 and len(asked) > 1

    JoinedWorker.stop_requested = stop_requested  # type: ignore[method-assign]
    return worker([path, "--run-folder", folder, "--resume-or-start", "--quiet"])


def test_pods_that_are_ended_fail_and_their_replacements_go_on_to_the_same_end(tmp_path: Path) -> None:
    path, folder = str(written(tmp_path)), tmp_path / "there"
    # Status 0 would say to Kubernetes that the job is done.
    assert run_ranks(2, again, path, str(folder), True) == [130, 130]
    stopped = max(int(each.name.removeprefix("step-")) for each in folder.glob("checkpoints/step-*"))
    assert 0 < stopped < 4
    assert run_ranks(2, again, path, str(folder), False) == [0, 0]
    # One that starts after the end has nothing left to do.
    assert run_ranks(2, again, path, str(folder), False) == [0, 0]
    run = train(make_job({**JOB, "run_dir": str(tmp_path / "here"), "parallel": {"workers": 2}})).run
    here, there = weights(Path(run)), weights(folder)
    assert all(bool((here[name] == there[name]).all()) for name in here)


def test_files_of_the_job_travel_with_it_and_code_that_does_not_is_named(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("x = 1\n")
    (tmp_path / "two.json").write_text("{}\n")
    path = written(tmp_path, model="own:net", parallel={"plan": str(tmp_path / "two.json")})
    plain = ["manifest", str(path), "--image", "plait:1"]
    assert f"--include {tmp_path / 'own.py'}" in CliRunner().invoke(app, plain).stderr
    done = CliRunner().invoke(app, [*plain, "--include", str(tmp_path / "own.py")])
    assert done.stderr == ""
    files = next(yaml.safe_load_all(done.stdout))["data"]
    assert (files["own.py"], files["plan.json"]) == ("x = 1\n", "{}\n")
    assert yaml.safe_load(files["job.yaml"])["parallel"]["plan"] == "/etc/plait/plan.json"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--kind", "pod"], "--kind: found 'pod'"),
        (["--nodes", "0"], "--nodes: found 0, expected 1"),
        (["--name", "A_b"], "--name: found 'A_b', expected lower-case"),
        (["--memory", "16 GB"], "--memory: found '16 GB', expected a quantity"),
        (["--set", "parallel.elastic=true"], "parallel.elastic: found true, but Kubernetes decides"),
        (["--set", "parallel.plan=auto"], "make a plan first"),
        (["--set", "name='7'"], "use --name"),
        (["--kind", "trainjob", "--port", "5"], "--port: found 5"),
        (["--nodes", "100"], "data.batch_size: found 60 for 100 workers"),
    ],
)
def test_what_cannot_run_is_refused_with_the_flag_or_key(tmp_path: Path, words: list[str], why: str) -> None:
    done = CliRunner().invoke(app, ["manifest", str(written(tmp_path)), "--image", "plait:1", *words])
    assert isinstance(done.exception, InputError)
    assert done.exception.exit_status == 2
    assert why in str(done.exception)


def test_names_become_labels() -> None:
    assert [label_of(name) for name in ("My.Job_1", "7", "a" * 60, "-x-")] == [NAME, "", "a" * 40, "x"]
