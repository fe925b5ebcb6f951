"""The documents are correct: snippets run, every key and every event is described."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import subprocess
import sys
import textwrap
import traceback
import typing
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import plait
from plait.adapt.policies.registry import POLICIES
from plait.core import run_events
from plait.core.events import Event
from plait.core.names import EXTRAS
from plait.core.yaml_text import load_yaml
from plait.schema.aliases import KEY_ALIASES
from plait.schema.job import Job, make_job, parse
from plait.schema.limits import MapContent
from plait.schema.placement import Engine
from plait.schema.plans.schedules import Schedule
from plait.schema.settings import SEARCHES
from plait.schema.sync_options import KINDS
from support.world import run_ranks
from test_packages import ORDER

pytestmark = pytest.mark.usefixtures("forked_commands")

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


def test_the_readme_is_short_and_has_no_table_of_numbers():
    lines = text("README.md").splitlines()
    assert len(lines) <= 130
    assert sum(len(line.split()) for line in lines) <= 1100
    assert not [line for line in lines if line.startswith("|") and re.search(r"\d+(\.\d+)?x\b", line)]


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", without_code(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(str(each.relative_to(ROOT)) for each in (ROOT / "docs").rglob("*.md")),
]


@pytest.mark.parametrize("page", DOCUMENTS)
def test_every_link_leads_to_a_file_and_a_heading(page: str):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", without_code(ROOT / page))):
        file, _, anchor = link.partition("#")
        target = ROOT / page if not file else (ROOT / page).parent / file
        if not link.startswith(("http://", "https://")) and (
            not target.exists() or (anchor and anchor not in anchors(target))
        ):
            broken.append(link)
    assert not broken


def rows_of(page: str, head: str) -> list[list[str]]:
    """The cells of the table whose first row begins with `head`."""
    table = text(page).partition(f"| {head} |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]


def test_the_table_of_capabilities_names_what_exists():
    """Objects of `plait`, keys of a job, and pages that tell of them."""
    for _, objects, keys, page, _ in rows_of("docs/capabilities.md", "capability"):
        for name in re.findall(r"`plait\.(\w+)`", objects):
            assert name in plait.__all__, name
            assert any(f"plait.{name}" in text(each) for each in DOCUMENTS if "capabilities" not in each), (
                name
            )
        known = {part for key in job_defaults() for part in (key, key.rpartition(".")[0], key.split(".")[0])}
        for key in re.findall(r"`([\w.]+)`", keys):
            assert key in known or f"{key.rpartition('.')[0]}.*" in known, key
        (link,) = re.findall(r"\]\(([^)#]+)", page)
        assert (ROOT / "docs" / link).exists()


def test_the_readme_denies_what_the_table_of_capabilities_denies_and_nothing_else():
    denied = [row[4] for row in rows_of("docs/capabilities.md", "capability") if row[4]]
    section = text("README.md").partition("## What it does not do\n\n")[2].partition("\n\n")[0]
    assert section.partition(" [What does not go together]")[0] == " ".join(denied)


# Words by which a page denies a capability, rather than telling how it behaves.
DENIALS = re.compile(
    r"\b(is|are) to come\b|\bnot yet\b|\bnot (supported|implemented|available)\b|\bunsupported\b"
    r"|\b(was|were) (not|never|only) tried\b|\bthere is no `",
    flags=re.IGNORECASE,
)


def denials(page: str) -> list[str]:
    """The sentences of a page that deny a capability."""
    prose = re.sub(r"`[^`\n]*`", lambda code: code[0].replace(".", "\0"), without_code(ROOT / page))
    sentences = re.split(r"(?<=[.!?])\s+|\s*\|\s*|\n\s*\n|\n\s*- ", prose)
    return [each.replace("\0", ".").strip() for each in sentences if DENIALS.search(each)]


# Notes of experiments say what was tried; the change log tells of former versions.
@pytest.mark.parametrize("page", sorted({*DOCUMENTS} - {"docs/results/fusion-notes.md", "CHANGELOG.md"}))
def test_a_page_denies_only_what_the_table_of_capabilities_denies(page: str):
    denied = " ".join(row[4] for row in rows_of("docs/capabilities.md", "capability"))
    assert not [sentence for sentence in denials(page) if sentence not in denied]


def test_what_the_table_of_capabilities_offers_it_does_not_deny():
    """Neither by the name of an object or key nor by that of a verb."""
    rows = rows_of("docs/capabilities.md", "capability")
    offered = {name for row in rows for name in re.findall(r"`([\w.]+)`", row[1] + row[2])}
    denied = {name for row in rows for name in re.findall(r"`([^`]+)`", row[4])}
    assert not offered & denied


def test_every_bullet_of_the_readme_leads_to_a_page_of_the_table_of_capabilities():
    section = text("README.md").partition("## What it does\n")[2].partition("Three numbers")[0]
    pages = re.findall(r"^- \*\*\[[^]]+\]\(docs/([^)]+)\)\*\*", section, flags=re.MULTILINE)
    assert len(pages) == 6
    assert set(pages) <= {
        re.findall(r"\]\(([^)#]+)", row[3])[0] for row in rows_of("docs/capabilities.md", "capability")
    }


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("docs/pipelines.md", [each.value for each in Schedule]),
        ("docs/sync.md", [*KINDS, "auto"]),
        ("docs/adapt.md", POLICIES),
        ("docs/sweep.md", SEARCHES),
        ("docs/clusters.md", typing.get_args(Engine)),
        ("docs/commands.md", {*EXTRAS.values()}),
    ],
)
def test_what_can_be_chosen_from_is_listed_whole_in_the_page_of_the_capability(page: str, names: list[str]):
    assert not [name for name in names if f"`{name}`" not in text(page)]


def test_the_tour_of_the_code_names_what_is_there():
    """All packages in their order, and functions and classes in the files that it links to."""
    named = [name for row in rows_of("docs/code.md", "package") for name in re.findall(r"`(\w+)`", row[0])]
    assert named == list(ORDER)
    hops = re.findall(r"`([\w.]+)` (?:on each host )?\(\[[^]]+\]\(\.\./([^)]+\.py)\)", text("docs/code.md"))
    assert len(hops) > 20
    for name, path in hops:
        for part in name.removeprefix("plait.").split("."):
            assert re.search(rf"\b(def|class) {part}\b", text(path)), (name, path)


def test_the_example_runs_as_the_readme_shows(tmp_path: Path):
    command = ["train", str(ROOT / "examples/digits.yaml"), "--set", "epochs=1"]
    done = subprocess.run(
        [sys.executable, "-m", "plait", *command], cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    shown = text("README.md").partition("$ plait train examples/digits.yaml\n")[2].partition("```")[0]
    names = [line[:14].strip() for line in shown.splitlines()[1:-1]]
    assert [line[:14].strip() for line in done.stdout.splitlines()[:-1]] == names


TINY = """
name: tiny
model: plait.workloads.mlp:mlp_tiny
data: {kind: digits, batch_size: 512}
epochs: 4
"""


PAGES = [
    "README.md",
    "docs/adapt.md",
    "docs/audit.md",
    "docs/extending.md",
    "docs/fusion.md",
    "docs/jobs.md",
    "docs/library.md",
    "docs/sweep.md",
]


def run_snippets(
    rank: int, pages: dict[str, list[str]], folder: Path, environment: dict[str, str]
) -> dict[str, Any]:
    """For each page, what its snippets printed and the traceback of the first that failed."""
    dist.destroy_process_group()  # of the world that this process is forked for
    os.environ.update(environment)
    os.chdir(folder)
    found = {}
    for page, snippets in pages.items():
        printed, failure = io.StringIO(), None
        try:
            with contextlib.redirect_stdout(printed):
                for code in snippets:
                    exec(code, {})
        except BaseException:
            failure = traceback.format_exc()
        found[page] = {"printed": printed.getvalue(), "failure": failure}
    return found


def snippets_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text(page), flags=re.DOTALL)


def examples() -> list[str]:
    """The examples in the docstrings of `plait`; `train` makes the run that others look at."""
    names = sorted({*plait.__all__} - {"__version__"}, key=lambda name: name != "train")
    docs = [inspect.getdoc(getattr(plait, name)) or "" for name in names]
    given = "import torch\nfrom torch import nn\nimport plait\n"
    return [
        given + textwrap.dedent(code)
        for doc in docs
        for code in re.findall(r"^    ```python\n(.*?)^    ```", doc, flags=re.DOTALL | re.MULTILINE)
    ]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the snippets of all pages came to, in one process that has imported torch.

    Each is run by itself, with small jobs in the files that it names.
    """
    folder = tmp_path_factory.mktemp("pages")
    (folder / "examples").mkdir()
    for name in ("job.yaml", "examples/digits.yaml"):
        (folder / name).write_text(TINY)
    pages = {page: snippets_of(page) for page in PAGES} | {"docstrings": examples()}
    (found,) = run_ranks(1, run_snippets, pages, folder, dict(os.environ), deadline_s=280.0)
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", PAGES)
def test_the_python_in_the_pages_runs(page: str, ran: dict[str, Any]):
    """As it is written."""
    assert ran[page]["failure"] is None, ran[page]["failure"]
    prints = [code for code in snippets_of(page) if "\nprint(" in code]
    assert prints
    assert len(ran[page]["printed"].splitlines()) == len(prints)


@pytest.mark.timeout(300)
def test_the_examples_in_the_docstrings_run(ran: dict[str, Any]):
    assert len(examples()) > 20
    assert ran["docstrings"]["failure"] is None, ran["docstrings"]["failure"]


def test_every_verb_in_the_list_of_commands_exists():
    verbs = set(re.findall(r"^plait (\w+)", text("docs/commands.md"), flags=re.MULTILINE))
    listed = subprocess.run(
        [sys.executable, "-m", "plait", "--help"], capture_output=True, text=True, timeout=60
    )
    assert verbs == set(re.findall(r"^  (\w+) ", listed.stdout.partition("Commands:")[2], flags=re.MULTILINE))


def job_defaults(settings: type[Any] = Job, prefix: str = "") -> dict[str, Any]:
    """Every key of a job file with its default; MISSING where it must be given."""
    found = {}
    hints = typing.get_type_hints(settings, include_extras=True)
    for each in fields(settings):
        kinds = [hints[each.name], *typing.get_args(hints[each.name])]
        inner = next((kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)), None)
        if inner is not None:
            found |= job_defaults(inner, f"{prefix}{each.name}.")
        elif MapContent.EXTRA_KEYS in kinds and prefix != "lr_schedule.":  # named with each kind
            found |= {f"{prefix}*": None}
        elif not {MapContent.AS_GIVEN, MapContent.EXTRA_KEYS} & {
            k for k in kinds if isinstance(k, MapContent)
        }:
            made = each.default if each.default_factory is MISSING else each.default_factory()
            found[prefix + each.name] = made
    return found


def described_defaults() -> dict[str, str]:
    """What the table of keys says of each key's default."""
    found = {}
    table = text("docs/jobs.md").partition("| key | meaning | default |")[2].partition("\n\n")[0]
    for row in table.splitlines()[2:]:
        _, keys, _, default, _ = [cell.strip() for cell in row.split("|")]
        names = re.findall("`([^`]+)`", keys)
        parts = default.split(", ")
        each = parts if len(parts) == len(names) else [default] * len(names)
        assert not found.keys() & set(names), f"{names} are described twice"
        found |= dict(zip(names, each, strict=True))
    return found


@pytest.mark.parametrize("key", [*job_defaults(), *KEY_ALIASES])
def test_every_key_of_a_job_is_described(key: str):
    assert f"`{key}`" in text("docs/jobs.md")


def test_the_described_defaults_are_those_of_the_settings():
    defaults, described = job_defaults(), described_defaults()
    # Lists of sections are there too, not only the keys in them, and what all kinds of data take.
    others = {"optimizer.groups", "adapt", "data.synthetic", "callbacks", "evaluate.metrics"}
    assert described.keys() - KEY_ALIASES.keys() - defaults.keys() == others
    for key, default in defaults.items():
        words = described.get(key)
        if words == "required":
            assert default is MISSING, key
        elif words is not None and re.fullmatch("`[^`]+`", words) and described[key] != "`data.batch_size`":
            expected = list(default) if isinstance(default, tuple) else default
            assert load_yaml(words.strip("`")) == expected, key
        else:  # none, or what it depends on, in words
            assert default in (None, MISSING, {}, ()), key


def test_every_event_and_field_is_described():
    ours = [kind for kind in Event.kinds.values() if kind.__module__.startswith("plait.")]
    assert run_events.Step in ours
    sections = dict(
        re.findall(r"^## `([\w-]+)`\n(.*?)(?=^## |\Z)", text("docs/events.md"), flags=re.M | re.S)
    )
    for event in ours:
        for field in fields(event):
            assert f"`{field.name}`" in sections[event.kind()], (event.kind(), field.name)
