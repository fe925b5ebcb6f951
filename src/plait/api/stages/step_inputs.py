"""What a loop gives to `Pipeline.step`: inputs like the example, and the same batch on all workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from plait.comm.collectives import all_gather_values
from plait.core.errors import DataError, InputError
from plait.data.streams import checksum
from plait.pipeline.cutting.trace_job import check_target


class StepInputs:
    """Checks the arguments of `step` on workers that call it together.

    With `compares` the inputs of the first step are compared: workers with other batches would lose all
    samples but those of the first stage. Workers that do not compute the first stage may give tensors on the
    meta device.
    """

    def __init__(self, example: Any, workers: int, has_fixed_sizes: bool, compares: bool) -> None:
        self._workers, self._has_fixed_sizes = workers, has_fixed_sizes and workers > 1
        self._example = self._forms(example)
        self._compares = compares and workers > 1

    def check(self, x: Any, y: Any, reads: bool) -> None:
        """Refuse swapped arguments, a target that cannot be sent, and unlike batches in the first step.

        `reads` says whether this worker computes the first stage.
        """
        if reads and any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in pytree.tree_leaves((x, y))):
            raise InputError(
                "step: found a tensor on the meta device, but this worker reads the inputs "
                "(pipe.reads_inputs is True); expected the batch itself"
            )
        if self._forms(x) != self._example == self._forms(y):
            raise InputError(
                f"step: found inputs of {_describe(x)} and a target of {_describe(y)}, but it is the target "
                f"that looks like example_inputs; expected step(inputs, target)"
            )
        if self._workers > 1 and not isinstance(y, Tensor):
            try:
                check_target(y)
            except DataError as failure:
                raise InputError(f"step: {str(failure).removeprefix('data.kind: ')}") from None
        if self._compares:
            self._compare(x)
            self._compares = False

    def _compare(self, x: Any) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]
        is_absent = any(leaf.is_meta for leaf in tensors)
        of_all = all_gather_values((_describe(x), None if is_absent else checksum(tensors)))
        known = [(rank, each) for rank, (_, each) in enumerate(of_all) if each is not None]
        first, there = known[0]
        for rank, (form, _) in enumerate(of_all):
            if form != of_all[first][0]:
                raise InputError(
                    f"step: found inputs of {form} on rank {rank}, but of {of_all[first][0]} on rank {first} "
                    f"in the first step; all workers call step with the same whole batch, or with tensors of "
                    f"its shapes and types on the meta device where pipe.reads_inputs is False"
                )
        for rank, each in known:
            if each != there:
                raise InputError(
                    f"step: the inputs of rank {rank} are others than those of rank {first} in the first "
                    f"step; all workers call step with the same whole batch: leave a DistributedSampler "
                    f"out, take torch's DataLoader rather than plait.DataLoader, which shares batches out, "
                    f"and give loaders and transforms the same seed on all workers (verify=False leaves "
                    f"this check out)"
                )

    def _forms(self, value: Any) -> list[tuple[torch.dtype, object]]:
        """The types of the tensors, and their sizes without the batch as far as these cannot change."""
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        return [
            (each.dtype, each.shape[1:] if self._has_fixed_sizes and each.is_floating_point() else each.dim())
            for each in tensors
        ]


@contextlib.contextmanager
def in_words_of_step() -> Iterator[None]:
    """Errors about a batch within it are said as those of a loop, rather than of a job's data."""
    try:
        yield
    except DataError as failure:
        message = str(failure).replace("data.kind: ", "step: ")
        raise InputError(message.replace("set precision: float64", "use model.double()")) from failure


def _describe(value: Any) -> str:
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    shown = [f"shape {list(each.shape)} ({str(each.dtype).removeprefix('torch.')})" for each in tensors]
    return " and ".join(shown)
