"""Gradients of a table of embeddings that a dense layer reads, too, as the head of a language model does.

As autograd would have it, the lookup makes a gradient of the whole table, mostly zeros, and adds it to that
of the layer: five passes over the table. Here its rows are added to the layer's gradient.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.fusion.kernels import can_run_on
from plait.fusion.plain_function import PlainFunction
from plait.pipeline.split_backward import deferring

# Below, passes over memory cost less than to think about them.
_LEAST_ELEMENTS = 1 << 22


class Table:
    """The gradients of the tables of all trials, (trials, rows, channels), from one forward."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        # Rows that were looked up with their gradients, of each backward: one may fail before their total.
        self.looked_up: defaultdict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        # Where the gradient of a dense layer is, which nothing else reads.
        self.fresh: int | None = None

    def add(self, index: Tensor, gradient: Tensor) -> None:
        """Note the gradient of rows that were looked up."""
        self.looked_up[torch._C._current_graph_task_id()].append((index, gradient))

    def total(self, gradient: Tensor | None) -> Tensor | None:
        """That of other uses, with those of the rows that were looked up in this backward."""
        looked_up = self.looked_up.pop(torch._C._current_graph_task_id(), ())
        fresh, self.fresh = self.fresh, None
        if not looked_up:
            return gradient
        if gradient is None:
            total = torch.zeros_like(self._weight)
        elif gradient.is_contiguous():
            total = gradient if gradient.data_ptr() == fresh else gradient.clone()
        else:
            total = torch.empty_like(self._weight)
            # One trial after another, since torch copies what is not contiguous one number at a time.
            torch._foreach_copy_(list(total), list(gradient))
        for index, of_rows in looked_up:
            rows = of_rows.flatten(0, -2).to(total.dtype)
            total.flatten(0, 1).index_put_((index.flatten(),), rows, accumulate=True)
        return total


class _Collect(PlainFunction):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, table: Table) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.table = table
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        return ctx.table.total(gradient), None


class _LookUp(PlainFunction):
    @staticmethod
    def forward(ctx: Any, shared: Tensor, index: Tensor) -> Tensor:
        ctx.table, ctx.shape = table_of(shared), shared.shape
        ctx.save_for_backward(index)
        return F.embedding(index, shared.flatten(0, 1))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        (index,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient that is differentiated again
            zeros = gradient.new_zeros(ctx.shape).flatten(0, 1)
            rows = gradient.flatten(0, -2)
            return zeros.index_put((index.flatten(),), rows, accumulate=True).view(ctx.shape), None
        ctx.table.add(index, gradient)
        return None, None


class Tables:
    """The tables that rows of were looked up in one forward."""

    def __init__(self) -> None:
        # By the tensor that holds the values: that, and the same values for all who read them.
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def look_up(self, weight: Tensor, index: Tensor) -> Tensor:
        """The rows of an index into all tables, one after another."""
        if (shared := self._shared(weight)) is None:
            shared = _Collect.apply(weight, Table(weight))
            self._known[id(weight)] = weight, shared
        rows: Tensor = _LookUp.apply(shared, index)
        return rows

    def shared(self, weight: Tensor) -> Tensor:
        """`weight` for a dense layer, whose gradient is added to those of rows that were looked up before."""
        shared = self._shared(weight) if torch.is_grad_enabled() else None
        return weight if shared is None else shared

    def _shared(self, weight: Tensor) -> Tensor | None:
        _, shared = self._known.get(id(weight), (weight, None))
        # A model that sets `weight.data` has new values in other memory.
        return None if shared is None or shared.data_ptr() != weight.data_ptr() else shared


def can_collect(weight: Tensor) -> bool:
    """Whether a lookup in these tables is worth it, and its gradient may wait for others."""
    large = weight.numel() >= _LEAST_ELEMENTS and weight.requires_grad and torch.is_grad_enabled()
    whole = large and weight.is_leaf and weight.dim() == 3 and weight.is_contiguous()
    return whole and can_run_on(weight) and deferring(weight, None) is None


def table_of(weight: Tensor) -> Table | None:
    """The table whose values a dense layer reads, if it does."""
    return getattr(weight.grad_fn, "table", None)
