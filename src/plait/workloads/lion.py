"""Lion for the parameters of one model; torch.optim has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT


class Lion(torch.optim.Optimizer):
    """Lion (EvoLved Sign Momentum, https://arxiv.org/abs/2302.06675), with decoupled weight decay.

    Each weight moves by `lr` in the direction of the sign of an average of the gradient and its momentum. So
    learning rates are 3 to 10 times smaller than AdamW's, and weight decays as many times larger. `params`,
    `lr`, `weight_decay` and `maximize` are as in torch.optim; `betas` are the decays of that average and of
    the momentum.

    Examples:
        ```python
        optimizer = plait.Lion(nn.Linear(8, 1).parameters(), lr=1e-4, weight_decay=0.1)
        ```
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if not lr >= 0.0:
            raise ValueError(f"Invalid learning rate: {lr}")
        for index, beta in enumerate(betas):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
        if not weight_decay >= 0.0:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single optimization step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        updated = [p for p in group["params"] if p.grad is not None]
        if not updated:
            return
        for parameter in updated:
            if parameter.grad.is_sparse:
                raise RuntimeError("Lion does not support sparse gradients")
            if "exp_avg" not in self.state[parameter]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
        # Real and imaginary parts separately, as in torch.optim.
        weights = [_as_real(p.detach()) for p in updated]
        gradients = [_as_real(p.grad) for p in updated]
        averages = [_as_real(self.state[p]["exp_avg"]) for p in updated]
        if group["maximize"]:
            gradients = list(torch._foreach_neg(gradients))
        beta1, beta2 = group["betas"]
        directions = torch._foreach_lerp(averages, gradients, 1.0 - beta1)
        torch._foreach_sign_(directions)
        if group["weight_decay"]:
            torch._foreach_mul_(weights, 1.0 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(weights, directions, alpha=-group["lr"])
        torch._foreach_lerp_(averages, gradients, 1.0 - beta2)


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
