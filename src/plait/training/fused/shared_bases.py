"""The frozen model under the adapters of a sweep: built once, and wrapped for each trial."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.data.generators import GENERATORS, looks
from plait.fusion.copies import independent_copy
from plait.fusion.stacking import same_memory
from plait.schema.settings import LoraSettings

# Others change the weights of the base in place.
_PLAIN_STARTS: tuple[Any, ...] = (True, False, "gaussian")


@dataclass(frozen=True)
class _Base:
    key: Any
    # None if nothing was drawn at random to make it.
    seed: int | None
    model: nn.Module
    drawn: list[tuple[object, Any]]


class _LatestBase:
    """The base that was built last."""

    base: _Base | None = None


_kept: ContextVar[_LatestBase | None] = ContextVar("_kept", default=None)


@contextmanager
def base_held_once() -> Iterator[None]:
    """Context in which models with adapters that have the same base share its memory."""
    token = _kept.set(_LatestBase())
    try:
        yield
    finally:
        _kept.reset(token)


def leaves_base(adapter: LoraSettings) -> bool:
    """Whether an adapter begins without a change of the base."""
    return adapter.options.get("init_lora_weights", True) in _PLAIN_STARTS


def base_of(key: Any, seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    """What `make` returns, whose random numbers `seed` decides; in `base_held_once`, a copy in one memory.

    Random numbers are drawn on as after `make`. Buffers are copied.
    """
    kept = _kept.get()
    if kept is None:
        return make()
    if kept.base is None or kept.base.key != key or kept.base.seed not in (None, seed):
        kept.base = None  # before there is another
        before = looks()
        model = make()
        draws = looks() != before
        kept.base = _Base(key, seed if draws else None, model, [each.state() for each in GENERATORS])
    elif kept.base.seed is not None:
        for generator, state in zip(GENERATORS, kept.base.drawn):
            generator.set(*state)
    return independent_copy(kept.base.model, {id(p): same_memory(p) for p in kept.base.model.parameters()})


def take_trained(model: nn.Module) -> None:
    """Copy the weights of the base that a model with an adapter trains, such as its biases."""
    _take(model, lambda name, parameter: parameter.requires_grad)


def take_changed(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy the weights of the base that have other values in a state that is about to be loaded."""
    _take(
        model, lambda name, parameter: name in state and not torch.equal(parameter, state[name].to(parameter))
    )


@torch.no_grad()
def _take(model: nn.Module, needs: Callable[[str, nn.Parameter], bool]) -> None:
    kept = _kept.get()
    if kept is None or kept.base is None:
        return
    shared = {parameter.data_ptr() for parameter in kept.base.model.parameters()}
    for name, parameter in model.named_parameters():
        if parameter.data_ptr() in shared and needs(name, parameter):
            parameter.data = parameter.data.clone()
