"""`plait manifest`: a job as Kubernetes YAML."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from plait.cli.train import JsonFlag, SetOption


def manifest(
    job: Annotated[Path, typer.Argument(help="The job file (YAML).", show_default=False)],
    image: Annotated[str, typer.Option(help="Container image with Plait and your code.")],
    kind: Annotated[
        str,
        typer.Option(help="job (an Indexed Job), jobset (JobSet) or trainjob (Kubeflow Trainer's TrainJob)."),
    ] = "job",
    nodes: Annotated[int, typer.Option(help="Number of pods.")] = 1,
    slots: Annotated[int, typer.Option(help="Workers in a pod.")] = 1,
    gpus: Annotated[
        int | None, typer.Option(help="GPUs of a pod. [default: one a worker with device: cuda]")
    ] = None,
    cpus: Annotated[str | None, typer.Option(help="CPUs that a pod requests, such as 4.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory that a pod requests, such as 16Gi.")] = None,
    claim: Annotated[
        str | None, typer.Option(help="PersistentVolumeClaim for run folders. [default: a new one]")
    ] = None,
    storage: Annotated[str, typer.Option(help="Size of the new claim.")] = "10Gi",
    restarts: Annotated[int, typer.Option(help="How often a job that fails is started again.")] = 3,
    include: Annotated[
        list[Path] | None, typer.Option(help="A file to put next to the job file (repeatable).")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the objects and the run folder. [default: the job's]")
    ] = None,
    namespace: Annotated[str | None, typer.Option(help="Namespace of the objects.")] = None,
    port: Annotated[int, typer.Option(help="Port at which the workers meet.")] = 29500,
    set_: SetOption = None,
    json_: JsonFlag = False,
) -> None:
    """Print Kubernetes YAML that trains a job: pods, their job file, and a volume for run folders.

    Example: plait manifest examples/digits.yaml --kind jobset --nodes 2 --image IMAGE | kubectl apply -f -
    """
    from plait.jobs.manifest import PodSettings, make_manifests, modules_left_out, render
    from plait.schema.job import read_job
    from plait.schema.job_checks import ON_THIS_HOST

    pods = PodSettings(
        kind=kind,
        image=image,
        nodes=nodes,
        slots=slots,
        name=name,
        namespace=namespace,
        gpus=gpus,
        cpus=cpus,
        memory=memory,
        claim=claim,
        storage=storage,
        restarts=restarts,
        port=port,
        include=tuple(include or ()),
    )
    asked = read_job(job, [*(set_ or []), ("parallel.workers", nodes * slots), *ON_THIS_HOST])
    objects = make_manifests(asked, pods)
    for path in modules_left_out(asked, pods.include):
        print(f"note: the job names {path}; it must be in the image, or: --include {path}", file=sys.stderr)
    if json_:
        print(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
    else:
        print(render(objects), end="")
