"""A selection of what benchmarks/fuzz_fusion.py tries: torch's operations on fused tensors and alone."""

from __future__ import annotations

import pytest
import torch

from fuzz_fusion import LAYOUTS, operations, try_operation

# Operations with rules of their own, with rarer signatures, under vmap, trial by trial and in place.
NAMES = (
    "add addmm amax as_strided atan2 baddbmm cat chunk clamp cumsum diagonal einsum expand flatten gather "
    "index_put index_reduce.mean index_select log_softmax masked_fill matmul max.reduction_no_dim "
    "max.reduction_with_dim mean median meshgrid.list_of_tensors movedim nn.functional.avg_pool2d "
    "nn.functional.batch_norm nn.functional.conv2d nn.functional.cross_entropy nn.functional.embedding "
    "nn.functional.group_norm nn.functional.interpolate.bilinear nn.functional.layer_norm "
    "nn.functional.max_unpool2d nn.functional.nll_loss nn.functional.pad.reflect nn.functional.prelu "
    "nonzero reshape roll scatter select_scatter softmax sort split squeeze std sum_to_size t "
    "tile topk unfold unsqueeze var_mean view view_as_complex where"
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES.split())
def test_an_operation_on_fused_tensors_is_right_or_refused(name):
    found = operations()
    if name not in found:
        pytest.skip(f"torch {torch.__version__} has no samples of {name}")
    tally = try_operation(found[name], seed=1, samples=2, layouts=LAYOUTS[-1:])
    assert not tally.counts["wrong"], tally.examples["wrong"]
    assert not tally.counts["bare error"], tally.examples["bare error"]
    assert tally.counts["right"] + tally.counts["refused"] > 0
