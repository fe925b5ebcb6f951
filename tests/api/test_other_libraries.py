"""Models of Lightning and Hugging Face, as docs/library.md shows them: two workers have the loss of one."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from support.world import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "library.md"
# Blocks that need packages which are not installed with Plait.
SNIPPETS = re.findall(r"```py\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def printed(_rank: int, code: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, str(PAGE), "exec"), {"__name__": "__main__"})
    return out.getvalue()


# Lightning: pip install --target FOLDER --no-deps pytorch-lightning lightning-utilities torchmetrics
@pytest.mark.extended
@pytest.mark.parametrize(("package", "at"), [("transformers", 0), ("pytorch_lightning", 1)])
def test_a_model_of_another_library_has_the_loss_of_one_process_on_two_workers(package: str, at: int):
    pytest.importorskip(package)
    assert package in SNIPPETS[at]
    (alone,) = run_ranks(1, printed, SNIPPETS[at])
    first, _ = run_ranks(2, printed, SNIPPETS[at])
    assert float(first.split()[1]) == pytest.approx(float(alone.split()[1]), abs=1e-10)
