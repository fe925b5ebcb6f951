"""What an agent sets up for its workers, and what it removes of them when they have ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.launcher.agent import choose_threads, remove_shared_files


def test_only_files_of_the_given_processes_are_removed(tmp_path: Path):
    theirs = ["torch_4660_99_0", "torch_4660_99_1", "cuda.shm.0.1234.1"]
    others = ["torch_46601_9_0", "torch_466_0_0", "cuda.shm.0.12345.1", "sem.4660", "torch_4661_1_1"]
    for name in theirs + others:
        (tmp_path / name).touch()
    remove_shared_files([0x1234], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(others)


@pytest.mark.parametrize(
    ("asked", "variable", "threads"),
    [
        (None, None, 4),
        (None, "1", 1),
        (None, "3,2", 3),
        (5, "1", 5),
        (None, "", 4),
        (None, "0", 4),
        (None, "all", 4),
    ],
)
def test_the_threads_of_a_worker_are_the_jobs_else_the_environments_else_its_share(
    asked: int | None, variable: str | None, threads: int
):
    environment = {} if variable is None else {"OMP_NUM_THREADS": variable}
    assert choose_threads(asked, 2, 8, environment) == threads
