"""Runs a single trial on plain tensors, with the random numbers that it draws in an array.

Used for modules that run trial by trial, and for plain models that a fused one is compared with: the user's
code runs on ordinary tensors. Random functions with a rule draw from the trial's stream; other random
functions use generators that are seeded for the trial.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from plait.fusion.dispatch.fallback import body_of
from plait.fusion.dispatch.random import Streams
from plait.fusion.dispatch.registry import RULES, Arguments, Function, Options, usual_form
from plait.fusion.dispatch.tensor import Trials, TrialTensor
from plait.fusion.dispatch.torch_patches import running
from plait.fusion.rules.attention import check_one_mask, given_to_attention, safe_softmax
from plait.fusion.rules.dropout import alpha_dropout, drop, dropout, feature_dropout
from plait.fusion.rules.random_numbers import (
    ATTENTION,
    FILLS,
    NEW,
    OF_TENSORS,
    OPENED,
    RECURRENT,
    draw_new,
    is_new,
    with_tensor,
)
from plait.verification import same_random_numbers

_DROPOUTS = frozenset(f for f, by in RULES.items() if by in (alpha_dropout, dropout, feature_dropout))
_DRAWS = OF_TENSORS | FILLS
_CHANGED = _DROPOUTS | _DRAWS | NEW | OPENED | ATTENTION | RECURRENT


class SingleTrialMode(TorchFunctionMode):
    """Function mode in which a single trial's code runs on plain tensors and draws from its stream."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self.trials = Trials(1, streams)
        self._contexts: list[Any] = []

    def __enter__(self) -> SingleTrialMode:
        context = running(self._again, None)
        context.__enter__()
        self._contexts.append(context)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        self._contexts.pop().__exit__(*failure)

    def _again(self) -> Callable[[], SingleTrialMode]:
        """A factory of the mode for activation checkpoints that recompute in backward."""
        streams = self.streams.repeated()
        return lambda: SingleTrialMode(streams.repeated())

    @property
    def streams(self) -> Streams:
        assert self.trials.streams is not None
        return self.trials.streams

    def __torch_function__(
        self, func: Function, types: Any, args: Arguments = (), kwargs: Options | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _CHANGED:  # most calls
            return func(*args, **kwargs)
        given = kwargs.get("generator") is not None or kwargs.get("out") is not None
        if not given and is_new(func, args, kwargs):
            drawn = draw_new(self.streams, func, args, kwargs)[0]
            return drawn.requires_grad_() if kwargs.get("requires_grad") else drawn
        if func in _DROPOUTS or (func in _DRAWS and not given):
            return self._by_rule(func, args, kwargs)
        if func in OPENED:
            with self:
                return body_of(func)(*args, **kwargs)
        if func in ATTENTION:
            return self._attention(func, args, kwargs)
        if func in RECURRENT and not isinstance(args[3], (list, tuple)):
            return self._recurrent(func, args)
        return func(*args, **kwargs)

    def _by_rule(self, func: Function, args: Arguments, kwargs: Options) -> Any:
        def wrap(x: Tensor) -> TrialTensor:
            made.append((x, TrialTensor(x.unsqueeze(0), self.trials)))
            return made[-1][1]

        made: list[tuple[Tensor, TrialTensor]] = []
        args, options = usual_form(func, *with_tensor(wrap, args, kwargs))
        outcome = RULES[func](func, args, options)
        x, wrapped = made[0]
        if outcome is wrapped:  # not active, or in place
            return x
        result: Tensor = outcome.stacked.squeeze(0)
        return result.requires_grad_() if kwargs.get("requires_grad") else result

    def _drop(self, x: Tensor, p: float) -> Tensor:
        return drop(x.unsqueeze(0), p, self.trials).squeeze(0)

    def _attention(self, func: Function, args: Arguments, kwargs: Options) -> Any:
        """Attention with materialized weights, for dropout."""
        given = given_to_attention(args, kwargs)
        if not given["dropout_p"]:
            return func(*args, **kwargs)
        check_one_mask(given)
        query, key, value = (given[name] for name in ("query", "key", "value"))
        if given["enable_gqa"]:
            key, value = (
                part.repeat_interleave(query.shape[-3] // part.shape[-3], -3) for part in (key, value)
            )
        scale = given["scale"] if given["scale"] is not None else 1.0 / math.sqrt(query.shape[-1])
        scores = (query * scale) @ key.mT
        mask = given["attn_mask"]
        if given["is_causal"]:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        return self._drop(safe_softmax(scores), given["dropout_p"]).to(value.dtype) @ value

    def _recurrent(self, func: Function, args: Arguments) -> Any:
        """Recurrent layers one after the other, with dropout between them."""
        x, state, weights, has_bias, count, dropout, training, both_ways, batch_first = args
        if not (training and dropout and count > 1):
            return func(*args)
        is_pair = isinstance(state, (tuple, list))
        states = list(state) if is_pair else [state]
        directions = 2 if both_ways else 1
        per_layer = len(weights) // count
        ends = []
        for layer in range(count):
            if layer:
                # The streams number elements in the order (batch, time, channels).
                x = self._drop(x if batch_first else x.transpose(0, 1), dropout)
                x = x if batch_first else x.transpose(0, 1)
            begin = [part[layer * directions : (layer + 1) * directions] for part in states]
            layer_weights = weights[layer * per_layer : (layer + 1) * per_layer]
            x, *end = func(
                x,
                tuple(begin) if is_pair else begin[0],
                layer_weights,
                has_bias,
                1,
                0.0,
                training,
                both_ways,
                batch_first,
            )
            ends.append(end)
        return (x, *(torch.cat(parts) for parts in zip(*ends)))


def seeded_for(streams: Streams) -> AbstractContextManager[None]:
    """Context in which the generators of torch, numpy and Python are seeded for one trial at this point.

    Afterwards their state is restored, so that trials do not affect each other's draws.
    """
    return same_random_numbers(streams.number())
