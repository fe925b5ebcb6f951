"""Schedulers of a whole fused optimizer: they keep the learning rates that trials began with."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree

from plait.fusion.dispatch.per_trial import PerTrial, one_each
from plait.fusion.optim.param_groups import FusedGroup

_INITIAL = "initial_lr"


def select_numbers(optimizer: torch.optim.Optimizer, numbers: Sequence[int]) -> None:
    """Select trials by their numbers in what schedulers have put into groups, and in the schedulers."""

    def select(value: PerTrial) -> PerTrial:
        return PerTrial([value.of(number) for number in numbers])

    for attributes in (*_groups(optimizer), *_schedulers(optimizer)):
        own = attributes.kind.torch_names() if isinstance(attributes, FusedGroup) else ()
        for name, value in list(attributes.items()):
            given = isinstance(value, (PerTrial, list, tuple)) and name not in own
            if given and any(isinstance(leaf, PerTrial) for leaf in pytree.tree_leaves(value)):
                attributes[name] = pytree.tree_map_only(PerTrial, select, value)


def begin_from(optimizer: torch.optim.Optimizer, number: int, lr: float) -> None:
    """Let schedulers compute the learning rates of trial `number` from `lr`."""

    def changed(value: Any, group: FusedGroup) -> PerTrial:
        values = one_each(_INITIAL, value, group.trials)
        values[number] = float(lr)
        return PerTrial(values)

    groups = _groups(optimizer)
    for group in groups:
        group[_INITIAL] = changed(group[_INITIAL], group)
    for attributes in _schedulers(optimizer):
        attributes["base_lrs"] = [changed(*pair) for pair in zip(attributes["base_lrs"], groups)]


def _groups(optimizer: torch.optim.Optimizer) -> list[FusedGroup]:
    return [group for group in optimizer.param_groups if isinstance(group, FusedGroup) and _INITIAL in group]


def _schedulers(optimizer: torch.optim.Optimizer) -> Iterator[dict[str, Any]]:
    """The attributes of the schedulers made on an optimizer, which does not know them."""
    if not _groups(optimizer):
        return
    seen = set()
    for holder in gc.get_referrers(optimizer):
        attributes = vars(holder) if isinstance(holder, LRScheduler) else holder
        if isinstance(attributes, dict) and id(attributes) not in seen and "base_lrs" in attributes:
            seen.add(id(attributes))
            if attributes.get("optimizer") is optimizer:
                yield attributes
