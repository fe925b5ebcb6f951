"""Every experiment that the command line names is there, and so is what its workers run."""

from __future__ import annotations

import importlib
import inspect
import re
import tomllib
from pathlib import Path

import pytest

import plait_bench
from plait.cli.bench import GROUP

SOURCE = Path(plait_bench.__file__).parent


# Those of the checkout, which may be more than were there when it was installed.
MODULES = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
PUBLISHED = (
    *("pipeline", "sync", "fusion", "fusion-partial", "fusion-convergence", "monitoring", "scalability"),
    *("adaptive-batch", "adaptive-topology", "elastic", "planner"),
)


def test_every_published_experiment_has_a_name() -> None:
    assert set(PUBLISHED) <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_an_experiment_has_a_quick_course_a_picture_and_parts_that_it_names(name: str) -> None:
    module = importlib.import_module(MODULES[name])
    parameters = inspect.signature(module.run).parameters
    assert parameters["quick"].default is False
    assert parameters["command"].default == f"plait bench {name}"
    assert ("parts" in parameters) == hasattr(module, "PARTS")
    assert all(isinstance(part, str) for part in getattr(module, "PARTS", {}))
    assert callable(module.write_plot)


RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAPERS = ("pipedream.md", "sdpipe.md", "hfta.md", "kungfu.md")


@pytest.mark.parametrize("page", PAPERS)
def test_the_page_of_a_paper_has_its_claim_our_figure_and_the_way_to_it(page: str) -> None:
    text = (RESULTS / page).read_text()
    for part in ("Their claim", "Our figure", "Command", "Machine", "Date"):
        assert f"**{part}:**" in text, part


@pytest.mark.parametrize("page", sorted(RESULTS.glob("*.md")), ids=lambda page: page.stem)
def test_the_experiments_and_parts_that_a_page_names_are_there(page: Path) -> None:
    name = ""
    for line in page.read_text().splitlines():
        # `--part NAME` alone is of the experiment that was named last.
        for command in re.findall(r"`([^`]+)`", line):
            if found := re.match(r"plait bench ([a-z][a-z-]+)", command):
                name = found[1]
                assert name in MODULES, line
            for part in re.findall(r"--part ([a-z-]+)", command):
                assert part in importlib.import_module(MODULES[name]).PARTS, line


def entries() -> list[tuple[str, str]]:
    found = []
    for path in SOURCE.rglob("*.py"):
        module = ".".join(("plait_bench", *path.relative_to(SOURCE).with_suffix("").parts))
        text = path.read_text()
        found += [(module, name) for name in re.findall(r'f"\{__name__\}:([A-Za-z_]+)"', text)]
        found += [(module, name) for name in re.findall(r"in_world\([^,]+, ([a-z_]+),", text)]
        found += re.findall(r'"(plait\.[a-z_.]+):([a-z_0-9]+)"', text)
    return found


def test_what_the_workers_of_experiments_run_is_there() -> None:
    assert len(entries()) > 15
    for module, name in entries():
        assert callable(getattr(importlib.import_module(module), name)), f"{module}:{name}"
