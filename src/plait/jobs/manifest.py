"""Kubernetes manifests of a job: pods whose processes run `plait.worker`, and what they need.

Each kind gives the pods an index, which becomes their rank, and a name under which they find the first one.
The job file travels in a ConfigMap, and run folders are on a volume, so that a restarted job goes on from its
newest checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from plait.core.errors import InputError
from plait.core.files import read_text
from plait.core.names import did_you_mean
from plait.core.plain_values import plain_copy
from plait.core.shown import shown
from plait.core.yaml_text import dump_yaml
from plait.schema.job import Job
from plait.schema.job_checks import check_joined
from plait.schema.topology_spec import check_topology

KINDS = ("job", "jobset", "trainjob")
# Where the files of the job and the run folders are in a pod.
FILES, RUNS = "/etc/plait", "/runs"
# The longest name: pods of a JobSet are called NAME-node-0-99999-xxxxx, with 63 characters at most.
_MOST_LETTERS = 40
# The limit of a ConfigMap.
_MOST_BYTES = 1 << 20
_INDEX = {
    "valueFrom": {
        "fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
    }
}
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?")
# Text that YAML 1.1 and 1.2 read as text even without quotes, unless PyYAML quotes it.
_PLAIN = re.compile(r"[A-Za-z/][\w./-]+")
# The exit status of wrong input: another attempt would end in the same way.
_WRONG_INPUT = {
    "rules": [
        {"action": "FailJob", "onExitCodes": {"containerName": "node", "operator": "In", "values": [2]}}
    ]
}

Manifest = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class PodSettings:
    """How a job runs on Kubernetes: `nodes` pods of `slots` workers each.

    `claim` is an existing PersistentVolumeClaim for the run folders; without one, a claim of `storage` is
    part of the manifest. `include` are files that are put next to the job file.
    """

    kind: str
    image: str
    nodes: int = 1
    slots: int = 1
    name: str | None = None
    namespace: str | None = None
    gpus: int | None = None
    cpus: str | None = None
    memory: str | None = None
    claim: str | None = None
    storage: str = "10Gi"
    restarts: int = 3
    port: int = 29500
    include: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(
                f"--kind: found {shown(self.kind)}, expected a kind{did_you_mean(self.kind, KINDS)}"
            )
        if not re.fullmatch(r"[^\s]+", self.image):
            raise InputError(f"--image: found {shown(self.image)}, expected an image with Plait in it")
        for flag, least in {"nodes": 1, "slots": 1, "gpus": 0, "restarts": 0, "port": 1}.items():
            if (number := getattr(self, flag)) is not None and not least <= number <= 65535:
                raise InputError(f"--{flag}: found {number}, expected {least} to 65535")
        for flag in ("cpus", "memory", "storage"):
            text = getattr(self, flag)
            if text is not None and not _QUANTITY.fullmatch(text):
                raise InputError(
                    f"--{flag}: found {shown(text)}, expected a quantity such as 4, 500m or 16Gi"
                )
        for flag in ("name", "namespace", "claim"):
            text = getattr(self, flag)
            if text is not None and text != label_of(text):
                raise InputError(
                    f"--{flag}: found {shown(text)}, expected lower-case letters, digits and hyphens, a "
                    f"letter first, {_MOST_LETTERS} at most"
                )
        if self.kind == "trainjob" and self.port != 29500:
            raise InputError(f"--port: found {self.port}, but the operator of a TrainJob always uses 29500")


def label_of(name: str) -> str:
    """`name` as a label of DNS, which Kubernetes takes for all names; "" if nothing of it is left."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).lstrip("-0123456789")
    return label[:_MOST_LETTERS].rstrip("-")


def render(manifests: Sequence[Manifest]) -> str:
    """The manifests as the documents of a YAML file."""
    return "---\n".join(yaml.dump(each, Dumper=_ManifestDumper, sort_keys=False) for each in manifests)


def make_manifests(job: Job, pods: PodSettings) -> list[Manifest]:
    """The objects that run `job`, in the order in which they are to be created.

    The job has `nodes` times `slots` workers. InputError if it cannot run on workers that others start.
    """
    check_joined(job, "Kubernetes")
    check_topology(job.topology, pods.nodes * pods.slots)
    name = pods.name or label_of(job.name)
    if not name:
        raise InputError(
            f"name: found {shown(job.name)}, of which no name for Kubernetes can be made; use --name"
        )
    objects = [_object("v1", "ConfigMap", f"{name}-job", data=_files(job, pods))]
    if pods.claim is None:
        modes = ["ReadWriteMany" if pods.nodes > 1 else "ReadWriteOnce"]
        wanted = {"accessModes": modes, "resources": {"requests": {"storage": pods.storage}}}
        objects.append(_object("v1", "PersistentVolumeClaim", f"{name}-runs", spec=wanted))
    make = {"job": _indexed_job, "jobset": _job_set, "trainjob": _train_job}[pods.kind]
    objects += make(name, job, pods)
    for each in objects:
        each["metadata"] |= {"labels": {**each["metadata"].get("labels", {}), "app.kubernetes.io/name": name}}
        if pods.namespace is not None:
            each["metadata"]["namespace"] = pods.namespace
    return objects


def modules_left_out(job: Job, include: Sequence[Path]) -> list[str]:
    """Python files next to the job file, or in the current folder, that it names and `include` lacks."""
    names = {text.partition(":")[0].partition(".")[0] for text in _code_names(job.content)}
    folders = [Path(job.folder or "."), Path()]
    paths = {name: [f / file for f in folders for file in (f"{name}.py", name)] for name in names}
    included = {path.name for path in include}
    return sorted(
        str(next(path for path in some if path.exists()))
        for some in paths.values()
        if any(path.exists() for path in some) and some[0].name not in included
    )


def _code_names(content: Any) -> list[str]:
    """All `package.module:name` in a job."""
    if isinstance(content, Mapping):
        return [name for each in content.values() for name in _code_names(each)]
    if isinstance(content, (list, tuple)):
        return [name for each in content for name in _code_names(each)]
    is_name = isinstance(content, str) and re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", content)
    return [content] if is_name else []


def _files(job: Job, pods: PodSettings) -> dict[str, str]:
    """What the ConfigMap holds: the job file, the files that it names, and those to include."""
    content, files = plain_copy(job.content), dict[str, str]()
    for key in ("plan", "topology"):
        path = Path(getattr(job.parallel, key))
        if path.suffix in (".json", ".yaml", ".yml"):
            files[f"{key}{path.suffix}"] = read_text(path, f"the file of parallel.{key}", _MOST_BYTES)
            content["parallel"][key] = f"{FILES}/{key}{path.suffix}"
    for path in pods.include:
        if path.name in (*files, "job.yaml") or not re.fullmatch(r"[-._A-Za-z0-9]+", path.name):
            raise InputError(
                f"--include: found {shown(str(path))}, expected a file with a name that is not taken yet, of "
                f"letters, digits, '-', '_' and '.'"
            )
        files[path.name] = read_text(path, "a text file", _MOST_BYTES)
    files = {"job.yaml": dump_yaml(content), **files}
    size = sum(len(text.encode()) for text in files.values())
    if size > _MOST_BYTES:
        raise InputError(
            f"--include: found {size:,} bytes in all, expected 1 MiB at most: put them in the image"
        )
    return files


def _indexed_job(name: str, job: Job, pods: PodSettings) -> list[Manifest]:
    # A lost pod ends the others, too, and one that replaces it meanwhile may end with them.
    spec = _job_spec(name, job, pods, f"{name}-0.{name}", failures=2 * pods.nodes * pods.restarts)
    spec["template"]["spec"]["subdomain"] = name
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"app.kubernetes.io/name": name},
        "ports": [{"name": "rendezvous", "port": pods.port}],
    }
    return [_object("v1", "Service", name, spec=service), _object("batch/v1", "Job", name, spec=spec)]


def _job_set(name: str, job: Job, pods: PodSettings) -> list[Manifest]:
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": pods.restarts,
            "rules": [
                {"name": "wrongInput", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
            ],
        },
        "replicatedJobs": [
            {
                "name": "node",
                "replicas": 1,
                # All pods are started again as soon as one fails.
                "template": {"spec": _job_spec(name, job, pods, f"{name}-node-0-0.{name}", failures=0)},
            }
        ],
    }
    return [_object("jobset.x-k8s.io/v1alpha2", "JobSet", name, spec=spec)]


def _train_job(name: str, job: Job, pods: PodSettings) -> list[Manifest]:
    """A TrainJob, and a runtime with its volumes, which a TrainJob cannot have in all versions."""
    group = "trainer.kubeflow.org"
    pod = _pod(name, job, pods, environment=[])
    (container,) = pod["containers"]
    node = {
        "name": "node",
        "template": {
            "metadata": {"labels": {f"{group}/trainjob-ancestor-step": "trainer"}},
            "spec": {"backoffLimit": 0, "template": {"spec": pod}},
        },
    }
    runtime = {
        "mlPolicy": {"numNodes": pods.nodes, "torch": {}},
        "template": {
            "spec": {"failurePolicy": {"maxRestarts": pods.restarts}, "replicatedJobs": [node]},
        },
    }
    trainer = {
        "image": pods.image,
        # The operator sets torchrun's variables, PET_NNODES and the others.
        "command": ["torchrun", *_worker(name)],
        "numNodes": pods.nodes,
        "numProcPerNode": pods.slots,
        "resourcesPerNode": container.pop("resources"),
    }
    made = _object(f"{group}/v1alpha1", "TrainingRuntime", name, spec=runtime)
    made["metadata"]["labels"] = {f"{group}/framework": "torch"}
    reference = {"apiGroup": group, "kind": "TrainingRuntime", "name": name}
    spec = {"runtimeRef": reference, "trainer": trainer}
    return [made, _object(f"{group}/v1alpha1", "TrainJob", name, spec=spec)]


def _job_spec(name: str, job: Job, pods: PodSettings, first: str, failures: int) -> Manifest:
    """An Indexed Job whose pod `first` has rank 0."""
    values = {"MASTER_ADDR": first, "MASTER_PORT": str(pods.port)}
    if pods.slots == 1:
        command, rank = [job.cluster.python or "python", *_worker(name)], "RANK"
        values = {"WORLD_SIZE": str(pods.nodes), **values}
    else:  # torchrun takes its options from such variables
        command, rank = ["torchrun", *_worker(name)], "PET_NODE_RANK"
        values = {"NNODES": str(pods.nodes), "NPROC_PER_NODE": str(pods.slots), **values}
        values = {f"PET_{key}": value for key, value in values.items()}
    environment = [{"name": rank, **_INDEX}, *_variables(values)]
    pod = _pod(name, job, pods, environment)
    pod["containers"][0] |= {
        "command": command,
        "ports": [{"name": "rendezvous", "containerPort": pods.port}],
    }
    return {
        "completionMode": "Indexed",
        "completions": pods.nodes,
        "parallelism": pods.nodes,
        "backoffLimit": failures,
        "podFailurePolicy": _WRONG_INPUT,
        "template": {"metadata": {"labels": {"app.kubernetes.io/name": name}}, "spec": pod},
    }


def _worker(name: str) -> list[str]:
    """The arguments of Python or torchrun; a restarted pod goes on in the run folder."""
    return ["-m", "plait.worker", f"{FILES}/job.yaml", "--run-folder", f"{RUNS}/{name}", "--resume-or-start"]


def _pod(name: str, job: Job, pods: PodSettings, environment: list[Manifest]) -> Manifest:
    volumes = {
        "files": {"configMap": {"name": f"{name}-job"}},
        "runs": {"persistentVolumeClaim": {"claimName": pods.claim or f"{name}-runs"}},
        # Containers have 64 MB of shared memory, in which workers and loaders exchange tensors.
        "memory": {"emptyDir": {"medium": "Memory"}},
    }
    mounts = {"files": FILES, "runs": RUNS, "memory": "/dev/shm"}
    container = {
        "name": "node",
        "image": pods.image,
        "env": [*environment, *_variables(job.cluster.environment)],
        "resources": _resources(job, pods),
        "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in mounts.items()],
    }
    return {
        "restartPolicy": "Never",
        # A pod that is asked to end writes a checkpoint first.
        "terminationGracePeriodSeconds": 120,
        "containers": [container],
        "volumes": [{"name": volume, **source} for volume, source in volumes.items()],
    }


def _resources(job: Job, pods: PodSettings) -> Manifest:
    """The GPUs of a pod, by default one a worker if the job is for GPUs, and what else it requests."""
    gpus = (pods.slots if job.device == "cuda" else 0) if pods.gpus is None else pods.gpus
    requested = {"cpu": pods.cpus, "memory": pods.memory}
    requests = {what: amount for what, amount in requested.items() if amount is not None}
    limits = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


def _variables(values: Mapping[str, str]) -> list[Manifest]:
    return [{"name": name, "value": value} for name, value in values.items()]


def _object(version: str, kind: str, name: str, **content: Any) -> Manifest:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **content}


class _ManifestDumper(yaml.SafeDumper):
    """Text of several lines as a block; quotes where a parser of YAML 1.1 or 1.2 could read a number."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = "|" if "\n" in text else None if _PLAIN.fullmatch(text) else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_ManifestDumper.add_representer(str, _ManifestDumper.represent_text)
