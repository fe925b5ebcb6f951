"""The job file: read once, checked whole, turned into plain settings.

Every mistake is answered with the key's path, what was found, what was expected and the nearest valid name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from plait.core.errors import JobError
from plait.core.files import read_text
from plait.core.plain_values import plain_copy
from plait.core.shown import shortened, shown
from plait.core.yaml_text import MOST_LEVELS, YamlError, load_yaml
from plait.schema.job_checks import check_combinations
from plait.schema.job_model import build, model_of
from plait.schema.job_settings import Job as Job
from plait.schema.messages import explain
from plait.schema.spellings import OwnSpelling

# A job file is a page or two of text.
MOST_BYTES = 1_000_000

# `a.b=c` as on the command line, or a key with its value.
Overrides = Sequence[str | tuple[str, Any]]


def read_job(path: str | Path, overrides: Overrides = ()) -> Job:
    """The job in the file `path` with overrides put over it: `a.b=c`, or a key and its value."""
    text = read_text(Path(path), "a job file (YAML)", MOST_BYTES, JobError)
    content = parse(text, str(path))
    if isinstance(kind := content.get("plait"), str):
        raise JobError(f"{path}: this is a {shortened(kind)} file, expected a job file (YAML)")
    return make_job(content, overrides)


def as_job(job: Job | str | Path | Mapping[str, Any]) -> Job:
    """A job that was given as such, as the path of its file, or as plain values."""
    if isinstance(job, Job):
        return job
    return read_job(job) if isinstance(job, (str, Path)) else make_job(job)


def make_job(content: Mapping[str, Any], overrides: Overrides = ()) -> Job:
    """A checked job from plain values, as a job file holds them."""
    if not isinstance(content, Mapping):
        raise JobError(f"found {shown(content)}, expected keys such as name, model and data; see read_job")
    spelling = OwnSpelling()
    tree = spelling.of_section(plain_copy(content))
    for override in overrides:
        _put(tree, override, spelling)
    try:
        checked = model_of(Job).model_validate(tree)
    except ValidationError as failure:
        raise JobError(explain(model_of(Job), failure, spelling.written)) from None
    job = replace(build(Job, checked), content=tree)
    check_combinations(job)
    return job


def parse(text: str, where: str) -> dict[str, Any]:
    """The mapping that a job file holds; `where` names the file in messages."""
    try:
        content = load_yaml(text)
    except YamlError as failure:
        line = "" if failure.line is None else f":{failure.line}"
        raise JobError(f"{where}{line}: {failure}") from None
    if not isinstance(content, dict):
        found = "nothing" if content is None else f"a {type(content).__name__}"
        raise JobError(f"{where}: found {found}, expected keys such as name, model and data")
    return content


def _put(tree: dict[str, Any], override: str | tuple[str, Any], spelling: OwnSpelling) -> None:
    path, value = _parse_override(override) if isinstance(override, str) else override
    path, value = spelling.of(path, plain_copy(value, path))
    shown_path = shortened(path)
    *parents, last = path.split(".")
    if not all((*parents, last)):
        raise JobError(f"--set: found {shown(path)}, expected a key of the job, such as optimizer.lr")
    if len(parents) > MOST_LEVELS:
        raise JobError(f"--set {shown_path}: found {len(parents) + 1:,} levels, expected a key of the job")
    for parent in parents:
        if tree.get(parent) is None:
            tree[parent] = {}
        below = tree[parent]
        if not isinstance(below, dict):
            raise JobError(
                f"--set {shown_path}: {shown(parent)} holds {shown(below)}, so it has no key {shown(last)}"
            )
        tree = below
    tree[last] = value


def _parse_override(override: str) -> tuple[str, Any]:
    path, equals, text = override.partition("=")
    if not equals:
        raise JobError(f"--set: found {shown(override)}, expected key.path=value, such as optimizer.lr=0.1")
    try:
        return path, load_yaml(text)
    except YamlError as failure:
        raise JobError(
            f"--set {shortened(path)}: found {shown(text)}, expected a YAML value ({failure})"
        ) from None
