"""The tutorials as tests see them: files to write, commands to run, and what they are to print.

A fenced block with a `title` is a file. In a `console` block, lines with `$ ` are commands and the others are
their output. `python tests/support/tutorials.py PAGE` writes the output of a new run into a page.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', flags=re.MULTILINE | re.DOTALL)
NUMBER = r"\d[\d.,]*(?:e[+-]?\d+)?"
UNIT = r" ?(?:%|x|[kMG]?B(?:/s)?|[mµn]?s)?(?![\w/])"
# Lines that a terminal shows in one place, one over the other; how many there are depends on the machine.
PROGRESS = re.compile(r"(step|\d+/\d+ trials ended  step) \d+/\d+(  .*)?")
PRECISE = re.compile(r"\d+\.\d{6,}")


def files(page: str) -> dict[str, str]:
    """The files of a page by name."""
    return {name: text for _, name, text in FENCE.findall(page) if name}


def commands(page: str) -> list[tuple[str, str]]:
    """Each command of a page with its output, in order."""
    return [
        (command, output)
        for kind, name, text in FENCE.findall(page)
        if kind == "console" and not name
        for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, flags=re.MULTILINE)
    ]


def arguments(command: str) -> list[str]:
    """The words of a command, for this Python."""
    first, *rest = shlex.split(command)
    python = {"plait": [sys.executable, "-m", "plait"], "python": [sys.executable]}
    return [*python[first], *rest]


def run(command: str, folder: Path, timeout_s: float) -> str:
    """What a command prints on both streams, without its progress; it must succeed."""
    done = subprocess.run(
        arguments(command),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{command}: status {done.returncode}\n{done.stdout}"
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    return "".join(f"{line}\n" for line in lines if not PROGRESS.fullmatch(line))


def expected(output: str) -> re.Pattern[str]:
    """What an output must look like: any numbers and units, and any text or lines in the place of `...`."""
    lines = []
    for line in output.splitlines():
        parts = re.split(rf"({NUMBER}{UNIT}|  +|\.\.\.)", line.rstrip())
        wild = [re.escape(part) if at % 2 == 0 else _wild(part) for at, part in enumerate(parts)]
        lines.append(r"(?:.*\n)*?" if line.strip() == "..." else "".join(wild) + r"\n")
    return re.compile("".join(lines))


def _wild(part: str) -> str:
    if part == "...":
        return ".*"
    return " +" if part.isspace() else rf"(?:{NUMBER}{UNIT}|nan)"


def write_output(path: Path) -> None:
    """Run the commands of a page and put what they print into it."""
    page = path.read_text()
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files(page).items():
            (Path(folder) / name).write_text(text)
        for command, output in commands(page):
            printed = run(command, Path(folder), 900.0)
            page = page.replace(f"$ {command}\n{output}", f"$ {command}\n{printed}", 1)
    path.write_text(page)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        write_output(Path(each))
