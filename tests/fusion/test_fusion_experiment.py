"""The fusion experiment measures what it is asked for and says what failed."""

from __future__ import annotations

import pytest

from plait.core.errors import InputError
from plait.experiments.bench import as_json
from plait.experiments.fusion import run, write_plot


def test_rows_claims_and_picture_cover_what_was_asked_for(tmp_path):
    bench = run(models=["mlp", "dcgan"], widths=(2,), modes=("serial", "vmap", "fused"), repeats=1)
    rows = {(row["model"], row["mode"]): row for row in bench.rows}
    assert len(rows) == 6
    assert rows["mlp", "fused"]["trials"] == 2
    assert rows["mlp", "fused"]["speedup"] > 0
    assert "pair of models" in rows["dcgan", "vmap"]["failed"]
    assert [claim.goal for claim in bench.claims] == [">= 4x", ">= 1x"]
    assert all(claim.value is not None for claim in bench.claims)
    assert as_json(bench)["name"] == "fusion"
    write_plot(bench, tmp_path / "fusion.png")
    assert (tmp_path / "fusion.png").stat().st_size > 1000


def test_an_unknown_model_or_mode_is_refused_with_the_nearest():
    with pytest.raises(InputError, match="'mpl'.*did you mean 'mlp'"):
        run(models=["mpl"])
    with pytest.raises(InputError, match="'fusd'.*did you mean 'fused'"):
        run(models=["mlp"], modes=["fusd"])
