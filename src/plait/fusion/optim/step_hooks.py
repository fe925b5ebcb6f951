"""Step hooks of an optimizer, looked for only where there are some."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch.optim import optimizer as torch_optimizer

Step = TypeVar("Step", bound=Callable[..., Any])


def hooked_on_demand(step: Step) -> Step:
    """`step`, in torch's wrapper only if there are hooks to call or a profiler is to see the step.

    The wrapper takes a time that counts in a step of a small model on a CPU.
    """
    hooked = torch.optim.Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def either(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        is_hooked = (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
            or torch.autograd._profiler_enabled()
        )
        return (hooked if is_hooked else step)(self, *args, **kwargs)

    # Torch then adds no wrapper.
    either.hooked = True  # type: ignore[attr-defined]
    return cast("Step", either)
