"""A selection of what benchmarks/fuzz_fusion.py tries: torch's operations on fused tensors and alone."""

from __future__ import annotations

import pytest
import torch

from fuzz_fusion import LAYOUTS, operations, try_operation
from support.further import but_further

# Operations with rules of their own, with rarer signatures, under vmap, trial by trial and in place.
NAMES = (
    "add as_strided cat einsum gather index_put masked_fill max.reduction_with_dim meshgrid.list_of_tensors "
    "nn.functional.batch_norm nn.functional.conv2d nn.functional.cross_entropy "
    "nn.functional.interpolate.bilinear nn.functional.max_unpool2d nonzero reshape scatter sort "
    "view_as_complex"
)
# More of the same kinds; test_fused_operations.py has most of them in modules.
FURTHER = (
    "addmm amax atan2 baddbmm chunk clamp cumsum diagonal expand flatten index_reduce.mean index_select "
    "log_softmax matmul max.reduction_no_dim mean median movedim nn.functional.avg_pool2d "
    "nn.functional.embedding nn.functional.group_norm nn.functional.layer_norm nn.functional.nll_loss "
    "nn.functional.pad.reflect nn.functional.prelu roll select_scatter softmax split squeeze std sum_to_size "
    "t tile topk unfold unsqueeze var_mean view where"
)
# Whose shapes or memory would differ between trials.
REFUSED = ("as_strided", "nonzero")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", but_further([*NAMES.split(), *FURTHER.split()], *FURTHER.split()))
def test_an_operation_on_fused_tensors_is_right_or_refused(name):
    found = operations()
    if name not in found:
        pytest.skip(f"torch {torch.__version__} has no samples of {name}")
    tally = try_operation(found[name], seed=1, samples=2, layouts=LAYOUTS[-1:])
    assert not tally.counts["wrong"], tally.examples["wrong"]
    assert not tally.counts["bare error"], tally.examples["bare error"]
    assert tally.counts["refused" if name in REFUSED else "right"] > 0
