"""The documents tell the truth: snippets run, every key and every event is described."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from plait.core import run_events
from plait.core.events import Event
from plait.schema.job import Job, OpenSection, Section, make_job, parse

ROOT = Path(__file__).parent.parent


def text(name: str) -> str:
    return (ROOT / name).read_text()


def test_the_job_in_the_readme_is_the_example_and_is_valid():
    (job,) = re.findall(r"```yaml\n(.*?)```", text("README.md"), flags=re.DOTALL)
    example = text("examples/digits.yaml")
    assert job == example.partition("\n")[2]
    make_job(parse(example, "example"))


def test_the_readme_names_the_two_commands_and_make_has_them():
    for command in ("demo", "test"):
        assert f"make {command}" in text("README.md")
        assert re.search(rf"^{command}:", text("Makefile"), flags=re.MULTILINE)


def test_the_example_runs_as_the_readme_shows(tmp_path: Path):
    command = ["train", str(ROOT / "examples/digits.yaml"), "--set", "epochs=1"]
    done = subprocess.run(
        [sys.executable, "-m", "plait", *command], cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    shown = text("README.md").partition("$ plait train examples/digits.yaml\n")[2].partition("```")[0]
    names = [line[:14].strip() for line in shown.splitlines()[1:-1]]
    assert [line[:14].strip() for line in done.stdout.splitlines()[:-1]] == names


def test_the_python_in_the_readme_runs(tmp_path):
    snippets = re.findall(r"```python\n(.*?)```", text("README.md"), flags=re.DOTALL)
    assert snippets
    for snippet in snippets:
        done = subprocess.run(
            [sys.executable, "-c", snippet], cwd=tmp_path, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr


TINY = """
name: tiny
model: plait.workloads.mlp:mlp_tiny
data: {kind: digits, batch_size: 512}
epochs: 4
"""


@pytest.mark.parametrize("page", ["docs/adapt.md", "docs/jobs.md", "docs/sweep.md"])
def test_the_python_in_the_pages_runs(page: str, tmp_path: Path):
    """As it is written, each snippet by itself, with small jobs in the files that it names."""
    (tmp_path / "examples").mkdir()
    for name in ("job.yaml", "examples/digits.yaml"):
        (tmp_path / name).write_text(TINY)
    snippets = re.findall(r"```python\n(.*?)```", text(page), flags=re.DOTALL)
    assert snippets
    script = f"for code in {snippets!r}:\n    exec(code, {{}})"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(snippets)


def test_every_verb_in_the_readme_exists():
    verbs = set(re.findall(r"^plait (\w+)", text("README.md"), flags=re.MULTILINE))
    listed = subprocess.run(
        [sys.executable, "-m", "plait", "--help"], capture_output=True, text=True, timeout=60
    )
    assert verbs
    for verb in verbs:
        assert re.search(rf"^  {verb} ", listed.stdout, flags=re.MULTILINE), verb


def job_keys(section: type[Section] = Job, prefix: str = "") -> list[str]:
    keys = []
    for name, field in section.model_fields.items():
        kinds = [
            k for k in (field.annotation, *getattr(field.annotation, "__args__", ())) if isinstance(k, type)
        ]
        inner = next((k for k in kinds if issubclass(k, Section)), None)
        keys += job_keys(inner, f"{prefix}{name}.") if inner else [prefix + name]
    return keys + ([prefix + "*"] if issubclass(section, OpenSection) and "schedule" not in prefix else [])


@pytest.mark.parametrize("key", job_keys())
def test_every_key_of_a_job_is_described(key: str):
    assert f"`{key}`" in text("docs/jobs.md")


def test_every_event_and_field_is_described():
    ours = [kind for kind in Event.kinds.values() if kind.__module__.startswith("plait.")]
    assert run_events.Step in ours
    sections = dict(
        re.findall(r"^## `([\w-]+)`\n(.*?)(?=^## |\Z)", text("docs/events.md"), flags=re.M | re.S)
    )
    for event in ours:
        for field in fields(event):
            assert f"`{field.name}`" in sections[event.kind()], (event.kind(), field.name)
