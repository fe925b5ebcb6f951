"""The loss of a pipeline, compared with the mean of its parts in the first microbatches."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from plait.core.errors import InputError
from plait.core.shown import shown
from plait.pipeline.stage import Loss
from plait.verification import unchanged_random_numbers
from plait.verification.loss_parts import describe_difference, rows_of, whole_and_in_parts
from plait.verification.python_state import unchanged_state

log = logging.getLogger(__name__)
# Microbatches that are looked at: the first ones may be without padding.
_LOOKS = 4


class CheckedLoss:
    """`loss`, with a warning if that of a microbatch is not the mean of those of its samples.

    Nothing is said of outputs and targets that do not have one row a sample.
    """

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self._looks = _LOOKS

    def __call__(self, output: Any, target: Any) -> Tensor:
        if self._looks:
            self._looks -= 1
            if words := self._describe(output, target):
                log.warning("Pipeline: %s", words)
                self._looks = 0
        loss = self._loss(output, target)
        if not isinstance(loss, Tensor) or loss.dim():
            found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else shown(loss)
            raise InputError(
                f"loss: it returned {found}, expected a tensor of one number, the mean over the batch; use "
                f"reduction='mean' or loss.mean()"
            )
        return loss

    def _describe(self, output: Any, target: Any) -> str:
        leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.dim()]
        if not leaves or (count := len(leaves[0])) < 2:
            return ""

        def of_rows(begin: int, end: int) -> float:
            rows = rows_of((output, target), count, begin, end)
            # It may count its calls, in itself or in a global.
            with unchanged_state({"loss": self._loss}):
                return float(copy.deepcopy(self._loss)(*rows))

        try:
            with torch.no_grad(), unchanged_random_numbers():
                whole, mean = whole_and_in_parts(of_rows, count)
        except Exception:  # whatever is wrong with these samples, the error of the step says it better
            return ""
        return describe_difference(count, whole, mean, leaves[0].dtype)
