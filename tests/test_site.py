"""The site that `make docs` builds: its pages, its API reference and its pictures, without mkdocs."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import plait

ROOT = Path(__file__).parent.parent
OBJECTS = [name for name in plait.__all__ if name != "__version__"]
# What only tests and other modules of Plait pass.
INTERNAL = {"clock", "others", "unnamed", "display", "world"}
# Made by other objects of `plait`, not by a caller.
RESULTS = {
    "AuditReport", "Cluster", "FusedModule", "Job", "OpenedRun", "Plan", "Profile", "RunResult", "StepLoss",
    "SweepResult", "TrialResult", "World",
}  # fmt: skip


class Settings(yaml.SafeLoader):
    """Reads mkdocs.yml without making the Python objects that it names."""


Settings.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def pages(nav: Any) -> Iterator[str]:
    """The pages in the navigation."""
    if isinstance(nav, str):
        yield nav
    else:
        for each in nav.values() if isinstance(nav, dict) else nav:
            yield from pages(each)


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_navigation_once():
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(), Settings)
    docs = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    # These are made from README.md, CONTRIBUTING.md and CHANGELOG.md.
    assert sorted(pages(settings["nav"])) == sorted([*docs, "index.md", "contributing.md", "changelog.md"])


def reference() -> dict[str, list[str]]:
    """The objects of the API page, each with the members that it shows."""
    text = (ROOT / "docs/api.md").read_text()
    entries = re.findall(r"^::: plait\.(\w+)\n((?:    .*\n)*)", text, flags=re.MULTILINE)
    found = {}
    for name, options in entries:
        assert name not in found
        lists = re.findall(r"members: \[([^]]*)\]", options)
        found[name] = [member for each in lists for member in each.split(", ")]
    return found


def test_the_reference_has_every_object_and_members_that_exist():
    assert sorted(reference()) == sorted(OBJECTS)
    for name, members in reference().items():
        for member in members:
            assert inspect.getdoc(getattr(getattr(plait, name), member)), f"{name}.{member}"


@pytest.mark.parametrize("name", OBJECTS)
def test_a_docstring_describes_every_argument_and_has_an_example(name: str):
    it = getattr(plait, name)
    doc = inspect.getdoc(it) or ""
    assert re.search(r"^Examples:\n    ```py", doc, flags=re.MULTILINE)
    before = doc.partition("Examples:")[0]
    arguments = set() if name in RESULTS else inspect.signature(it).parameters.keys() - INTERNAL
    assert not [each for each in arguments if not re.search(rf"\b{each}\b", before)]


@pytest.mark.parametrize("name", ["pipeline", "sync", "fused", "elastic", "packages"])
def test_a_picture_is_what_the_script_draws(name: str):
    draw = load_module(ROOT / "docs/pictures/draw.py")
    assert (ROOT / f"docs/pictures/{name}.svg").read_text() == draw.PICTURES[name]().svg()


@pytest.mark.extended  # the tests above check most of it; `make docs` does the same
def test_the_site_is_built_without_warnings(tmp_path: Path):
    pytest.importorskip("mkdocstrings_handlers.python", reason="mkdocs is not installed: make docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    built = "".join(path.read_text() for path in tmp_path.rglob("*.html"))
    assert not re.search(r'<(?:script|img)[^>]* src="?https?:|<link[^>]* href="?https?:', built)
