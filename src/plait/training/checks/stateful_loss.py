"""Checks for losses with state, which is neither saved in checkpoints nor shared by workers."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from plait.core.errors import JobError
from plait.data.call_model import forward
from plait.training.run import Run
from plait.verification import same_random_numbers
from plait.verification.python_state import PythonState, changed, tensors_in, unchanged_state
from plait.workloads.losses import IN_THE_MODEL, OwnLoss

_SAMPLES = 4


def check_loss(run: Run) -> None:
    """Refuse a loss that keeps tensors of what it has seen; warn of one that counts its calls.

    It is called on copies: the loss itself is as it was afterwards.
    """
    components, loss = run.components, run.components.loss
    is_seen = (
        components.is_whole and not components.train_set.is_stream and run.settings.verify.start != "off"
    )
    if not isinstance(loss, OwnLoss) or not is_seen:
        return
    custom = loss.loss
    buffers = list(custom.buffers()) if isinstance(custom, nn.Module) else []
    if not buffers and not any(True for _ in _state_of(custom).roots()):
        return
    with unchanged_state({"loss": custom, "model": components.model}), same_random_numbers(run.settings.seed):
        try:
            tried = copy.deepcopy(custom)
            before = _tensors(tried)
            state = _state_of(tried)
            tokens = state.tokens()
            _call(run, tried)
            kept = [shown for _, shown in changed(tokens, state.tokens())]
            written = not _same(before, _tensors(tried))
        except Exception:  # whatever is wrong with the loss, the first step's error says it better
            return
    if written:
        raise JobError(
            f"loss: {loss.kind} changes its tensors when it is called, which no checkpoint holds and "
            f"workers do not share; {IN_THE_MODEL}"
        )
    if not kept:
        return
    message = f"loss: {loss.kind} changes {kept[0]} when it is called"
    if _has_several(run):
        raise JobError(f"{message}, and some workers would not call it as often as others; {IN_THE_MODEL}")
    run.metrics.warn(f"{message}, which no checkpoint holds: a resumed run begins without it; {IN_THE_MODEL}")


def _has_several(run: Run) -> bool:
    """Whether several workers compute losses, not each of every step."""
    if run.settings.in_stages:
        return run.settings.stages.plan.stages[-1].replicas > 1
    return run.worker.memberships.can_change or run.settings.sync.kind != "all-reduce"


def _call(run: Run, loss: object) -> None:
    components, settings = run.components, run.settings
    count = min(_SAMPLES, len(components.train_set), settings.data.batch_size)
    inputs, target = components.examples(count, settings.seed)
    model = copy.deepcopy(components.model)
    with components.autocast():  # with gradients, by which a loss may know that it trains
        loss(forward(model, inputs), target)  # type: ignore[operator]


def _state_of(loss: object) -> PythonState:
    return PythonState(dict(loss.named_modules()) if isinstance(loss, nn.Module) else {"": loss})


def _tensors(loss: object) -> list[Tensor]:
    """A copy of the tensors of a loss."""
    named = list(loss.buffers()) if isinstance(loss, nn.Module) else []
    held = tensors_in(root.get() for root in _state_of(loss).roots())
    return [tensor.detach().clone() for tensor in (*named, *held)]


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape and torch.equal(a, b) for a, b in zip(one, other)
    )
