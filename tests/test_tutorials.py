"""The tutorials do what they show: their files are valid, and their commands print what the pages have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from plait.schema.job import make_job, parse
from support.tutorials import PRECISE, commands, expected, files, run

pytestmark = pytest.mark.usefixtures("forked_commands")

FOLDER = Path(__file__).parent.parent / "docs/tutorials"
PAGES = ["loop", "elastic", "pipeline", "stragglers", "sweep"]
# Verbs whose commands other tests run with small jobs, so that these pages are run by `make test-all`:
# tests/cli/test_commands.py, tests/cli/test_sweep_command.py; scripts like that of "loop" are run by
# tests/api/test_example_scripts.py.
ELSEWHERE = ["loop", "pipeline", "stragglers", "sweep"]


def text(page: str) -> str:
    return (FOLDER / f"{page}.md").read_text()


def test_every_tutorial_is_tested():
    assert sorted(PAGES) == sorted(path.stem for path in FOLDER.glob("*.md"))


@pytest.mark.parametrize("page", PAGES)
def test_the_files_of_a_tutorial_are_valid_and_its_commands_use_them(page: str):
    content = files(text(page))
    assert content
    for name, code in content.items():
        if name.endswith(".py"):
            compile(code, name, "exec")
        else:
            make_job(parse(code, name))
    for command, output in commands(text(page)):
        assert output, command
    named = re.findall(r"[\w-]+\.(?:py|yaml)", " ".join(command for command, _ in commands(text(page))))
    assert set(named) == content.keys()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.extended if page in ELSEWHERE else ()) for page in PAGES],
)
def test_a_tutorial_prints_what_it_shows(page: str, tmp_path: Path):
    """Numbers may differ; those with many digits that are equal in the page are equal here."""
    for name, code in files(text(page)).items():
        (tmp_path / name).write_text(code)
    equal: dict[str, str] = {}
    for command, output in commands(text(page)):
        printed = run(command, tmp_path, timeout_s=300.0)
        assert expected(output).fullmatch(printed), f"{command}\n{printed}"
        for shown, found in zip(PRECISE.findall(output), PRECISE.findall(printed), strict=True):
            assert equal.setdefault(shown, found) == found


def test_an_output_with_other_words_is_noticed():
    shown = "steps  46 of 46\nloss 0.1 in 3.2 ms (its log: ...)\n...\ndone\n"
    assert expected(shown).fullmatch("steps    9 of 9\nloss 2.5 in 14 s (its log: /tmp/x)\na\nb\ndone\n")
    assert not expected(shown).fullmatch("steps  9 of 9\nloss nothing in 14 s (its log: x)\ndone\n")
    assert not expected(shown).fullmatch("steps  9 of 9\nloss 2.5 in 14 s (its log: x)\n")
