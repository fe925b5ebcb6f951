"""A traced model computes what the model computes, however it is cut and whatever the batch."""

from __future__ import annotations

import pytest

from support.traced_models import MODELS, make, staged_step, whole_step


@pytest.mark.parametrize("count", [1, 3, 1000])
@pytest.mark.parametrize("name", MODELS)
def test_stages_chained_compute_what_the_model_computes_for_another_batch_size(name: str, count: int) -> None:
    model, example = make(name, batch=4)
    _, inputs = make(name, batch=3)
    staged_step(model, inputs, example, count).assert_equals(whole_step(model, inputs))
