"""Reads a job file, checks all of it, and turns it into plain settings.

Every error message has the key's path, what was found, what was expected and the nearest valid name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from plait.core.errors import JobError
from plait.core.files import expand_path, read_text
from plait.core.plain_values import plain_copy
from plait.core.shown import shortened, shown
from plait.core.yaml_text import MOST_LEVELS, YamlError, load_yaml
from plait.schema.aliases import AliasResolver
from plait.schema.job_checks import check_combinations
from plait.schema.job_model import build, model_of
from plait.schema.job_settings import Job as Job
from plait.schema.messages import explain

# A job file is a page or two of text.
MAX_BYTES = 1_000_000

# `a.b=c` as on the command line, or a key with its value.
Overrides = Sequence[str | tuple[str, Any]]


def read_job(path: str | Path, overrides: Overrides = ()) -> Job:
    """Read the job file `path` and apply `overrides`: `a.b=c`, or a key and its value.

    Examples:
        ```py
        job = plait.read_job("digits.yaml", ["optimizer.lr=0.1", ("parallel.workers", 2)])
        ```
    """
    path = expand_path(str(path), error=JobError)
    text = read_text(Path(path), "a job file (YAML)", MAX_BYTES, JobError)
    if Path(path).suffix == ".py":
        name = Path(path).stem
        raise JobError(
            f"{path}: a Python file, expected a job file (YAML) that names its code, as in model: {name}:Net "
            f"and data: {{kind: {name}:make_data, batch_size: 64}}"
        )
    content = parse(text, str(path))
    if isinstance(kind := content.get("plait"), str):
        raise JobError(f"{path}: this is a {shortened(kind)} file, expected a job file (YAML)")
    return _checked(replace(_build_job(content, overrides), folder=str(Path(path).absolute().parent)))


def as_job(job: Job | str | Path | Mapping[str, Any]) -> Job:
    """Accept a `Job`, the path of a job file, or the content of one as plain values."""
    if isinstance(job, Job):
        return job
    return read_job(job) if isinstance(job, (str, Path)) else make_job(job)


def make_job(content: Mapping[str, Any], overrides: Overrides = ()) -> Job:
    """Build and check a job from plain values, the content of a job file; `overrides` are as in `read_job`.

    Examples:
        ```python
        data = {"kind": "digits", "batch_size": 64}
        content = {"name": "digits", "model": "plait.workloads.mlp:mlp_tiny", "data": data}
        job = plait.make_job(content, ["epochs=1"])
        ```
    """
    return _checked(_build_job(content, overrides))


def _checked(job: Job) -> Job:
    check_combinations(job)
    return job


def _build_job(content: Mapping[str, Any], overrides: Overrides) -> Job:
    """The job, with each key checked, but not their combinations."""
    if not isinstance(content, Mapping):
        raise JobError(f"found {shown(content)}, expected keys such as name, model and data; see read_job")
    aliases = AliasResolver()
    tree = aliases.resolve_section(plain_copy(content))
    overridden = {_apply_override(tree, override, aliases) for override in overrides}
    # The length of a job is given by one of two keys; an override of one replaces the other.
    for key, other in (("epochs", "steps"), ("steps", "epochs")):
        if key in overridden and other not in overridden and tree[key] is not None:
            tree.pop(other, None)
    try:
        checked = model_of(Job).model_validate(tree)
    except ValidationError as failure:
        raise JobError(explain(model_of(Job), failure, aliases.written)) from None
    return _with_paths(replace(build(Job, checked), content=tree))


def _with_paths(job: Job) -> Job:
    """The job with `~` and variables in its paths expanded; its content stays as it was written."""

    def path(text: str, key: str) -> str:
        return expand_path(text, key, JobError)

    parallel, cluster = job.parallel, job.cluster
    return replace(
        job,
        run_dir=path(job.run_dir, "run_dir"),
        parallel=replace(
            parallel,
            plan=path(parallel.plan, "parallel.plan"),
            topology=path(parallel.topology, "parallel.topology"),
        ),
        cluster=replace(cluster, python=cluster.python and path(cluster.python, "cluster.python")),
    )


def parse(text: str, where: str) -> dict[str, Any]:
    """Parse the text of a job file into a mapping; errors name the file as `where`."""
    try:
        content = load_yaml(text)
    except YamlError as failure:
        line = "" if failure.line is None else f":{failure.line}"
        raise JobError(f"{where}{line}: {failure}") from None
    if not isinstance(content, dict):
        kind = "nothing" if content is None else f"a {type(content).__name__}"
        given = shown(content) if isinstance(content, str) else kind
        raise JobError(f"{where}: found {given}, expected keys such as name, model and data")
    return content


def _apply_override(tree: dict[str, Any], override: str | tuple[str, Any], aliases: AliasResolver) -> str:
    """Set a value in `tree`; returns its canonical key."""
    path, value = parse_override(override) if isinstance(override, str) else override
    path, value = aliases.resolve(path, plain_copy(value, path))
    short_path = shortened(path)
    *parents, last = path.split(".")
    if not all((*parents, last)):
        raise JobError(f"--set: found {shown(path)}, expected a key of the job, such as optimizer.lr")
    if len(parents) > MOST_LEVELS:
        raise JobError(f"--set {short_path}: found {len(parents) + 1:,} levels, expected a key of the job")
    for parent in parents:
        if tree.get(parent) is None:
            tree[parent] = {}
        section = tree[parent]
        if not isinstance(section, dict):
            raise JobError(
                f"--set {short_path}: {shown(parent)} is {shown(section)}, so it has no key {shown(last)}"
            )
        tree = section
    tree[last] = value
    return path


def parse_override(override: str, flag: str = "--set") -> tuple[str, Any]:
    """The key and the YAML value of `key=value`, an argument of `flag`."""
    path, equals, text = override.partition("=")
    if not equals:
        example = "key.path=value, such as optimizer.lr=0.1" if flag == "--set" else "name=value"
        raise JobError(f"{flag}: found {shown(override)}, expected {example}")
    try:
        return path, load_yaml(text)
    except YamlError as failure:
        raise JobError(
            f"{flag} {shortened(path)}: found {shown(text)}, expected a YAML value ({failure})"
        ) from None
