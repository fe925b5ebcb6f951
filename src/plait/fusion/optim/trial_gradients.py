"""Per-trial clipping and unscaling of the gradients of fused parameters."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from plait.fusion.dispatch.per_trial import of_trials
from plait.fusion.errors import FusionError

# Fused modules, whose parameters torch must not clip together.
_modules: weakref.WeakSet[Any] = weakref.WeakSet()
# Optimizers of torch whose update of an element depends on others, which may be those of other trials.
_JOINT_UPDATES: tuple[Any, ...] = (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon)


def clip_gradients(
    gradients: Sequence[Tensor],
    limit: Tensor,
    sum_squares: Callable[[Tensor], Tensor] | None = None,
    counted: Sequence[Tensor] | None = None,
) -> Tensor:
    """Scale each trial's gradients, in place, to a norm of at most its `limit`; returns the norms before.

    `sum_squares` adds the squared norms of gradients on other workers to those of `counted` here (None: all).
    """
    counted = gradients if counted is None else counted
    each = [torch.linalg.vector_norm(g.reshape(g.shape[0], -1), dim=1) for g in counted]
    norms = torch.linalg.vector_norm(torch.stack(each), dim=0) if each else torch.zeros_like(limit)
    if sum_squares is not None:
        norms = sum_squares(norms.square()).sqrt()
    scale = (limit.to(norms.dtype) / (norms + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(of_trials(scale, gradient))
    before: Tensor = norms
    return before


def unscale_gradients(gradients: Sequence[Tensor], inverse: Tensor | None, trials: int) -> Tensor:
    """Multiply gradients, in place, by one number or one per trial; returns which trials are not finite.

    Without a number they are only checked.
    """
    overflowed = torch.zeros(trials, dtype=torch.bool, device=gradients[0].device if gradients else None)
    for gradient in gradients:
        if inverse is not None:
            factor = inverse.to(gradient.dtype)
            gradient.mul_(of_trials(factor, gradient) if factor.dim() else factor)
        overflowed |= ~gradient.reshape(trials, -1).isfinite().all(1)
    return overflowed


def refuse_joint_updates(module: nn.Module) -> None:
    """Make clip_grad_norm_ and some optimizers of torch raise for the parameters of a fused module.

    They would clip or scale the gradients of all trials by a common number.
    """
    _modules.add(module)
    if not hasattr(clip_grad._clip_grads_with_norm_, "refuses_fused"):
        checked = _checked_clip(clip_grad._clip_grads_with_norm_)
        clip_grad._clip_grads_with_norm_ = checked
        nn.utils.clip_grads_with_norm_ = checked  # its public name
        # Not by hooks of optimizers, which every step of a fused one would have to look for.
        for kind in _JOINT_UPDATES:
            kind.step = _checked_step(kind.step)


def _checked_clip(clip: Callable[..., Any]) -> Any:
    @functools.wraps(clip)
    def checked(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if _are_fused(given):
            raise FusionError(
                "clip_grad_norm_: found parameters of a fused module, whose trials would be clipped by their "
                "common norm; expected fused.clip_grad_norm_(max_norm), or FusedOptimizer(..., "
                "clip_norm=...), which clip each trial by its own"
            )
        return clip(given, *args, **kwargs)

    checked.refuses_fused = True  # type: ignore[attr-defined]
    return checked


def _checked_step(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def checked(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if _are_fused([parameter for group in optimizer.param_groups for parameter in group["params"]]):
            name = type(optimizer).__name__
            raise FusionError(
                f"{name}: found parameters of a fused module, whose trials would be updated by numbers of "
                f"all of them; expected a plait.FusedOptimizer, which has 'adafactor' and 'muon', or each "
                f"trial alone"
            )
        return step(optimizer, *args, **kwargs)

    return checked


def _are_fused(parameters: Sequence[Tensor]) -> bool:
    fused = {id(p) for module in _modules if module.trials > 1 for p in module.parameters()}
    return any(id(parameter) in fused for parameter in parameters)
