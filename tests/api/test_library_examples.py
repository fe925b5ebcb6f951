"""The scripts of examples/ print the same alone and under torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def printed(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Within one process and in a small world, test_averaging.py shows the same.
@pytest.mark.extended
@pytest.mark.parametrize("name", ["averaging_loop.py", "elastic_loop.py"])
def test_an_example_prints_the_same_loss_alone_and_under_torchrun(name: str):
    script = str(EXAMPLES / name)
    alone = printed(script)
    assert alone.startswith("loss ")
    assert float(printed(*TORCHRUN, script).split()[1]) == pytest.approx(float(alone.split()[1]), abs=1e-10)


@pytest.mark.extended
def test_the_elastic_example_prints_the_same_loss_by_plait_run(tmp_path: Path):
    script = str(EXAMPLES / "elastic_loop.py")
    run = printed("-m", "plait", "run", "-np", "2", "--run-dir", str(tmp_path), script)
    found = run.split("loss ")[1].split()[0]
    assert float(found) == pytest.approx(float(printed(script).split()[1]), abs=1e-10)
