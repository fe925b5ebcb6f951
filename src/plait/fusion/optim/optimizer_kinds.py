"""The update of each optimizer for all trials at once: every coefficient has one value per trial.

Formulas are those of torch.optim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from plait.fusion.dispatch.per_trial import of_trials
from plait.fusion.optim.kind import Common, OptimizerKind, Vectors, WithState
from plait.fusion.optim.matrix_kinds import ADAFACTOR, MUON
from plait.fusion.optim.step_clock import StepClock, nadam_momentum
from plait.workloads.lion import Lion

_BETAS = {"betas": ("beta1", "beta2")}
_ADAMS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}


def _sgd_kernel(
    parameters: list[Tensor], gradients: list[Tensor], buffers: list[Tensor], momentum: float, **options: Any
) -> None:
    update: Callable[..., None] = torch._fused_sgd_
    # With a buffer of zeros, the first step needs no special case.
    update(
        parameters,
        gradients,
        buffers if momentum else [],
        momentum=momentum,
        is_first_step=False,
        **options,
    )


def _sgd_coefficients(h: Vectors, clock: StepClock) -> dict[str, Tensor]:
    # The first step fills the momentum buffer with the whole gradient, without dampening. Without momentum
    # the buffer does not change.
    enter = torch.where(clock.pushes == 0, 1.0, 1.0 - h["dampening"])
    stays = h["momentum"] == 0
    return {
        **h,
        "keep": torch.where(stays, 1.0, h["momentum"]),
        "enter": torch.where(stays, 0.0, enter),
    }


def _sgd(p: Tensor, g: Tensor, state: dict[str, Tensor], c: Vectors, common: Common) -> None:
    g = g + c["weight_decay"] * p
    if "momentum_buffer" in state:
        buffer = state["momentum_buffer"]
        buffer.mul_(c["keep"]).add_(g * c["enter"])
        pushed = g + c["momentum"] * buffer if common["nesterov"] else buffer
        g = torch.where(c["momentum"] != 0, pushed, g)
    p.sub_(c["lr"] * g)


def _adam_coefficients(h: Vectors, clock: StepClock) -> dict[str, Tensor]:
    step = clock.steps.double() + 1
    return {"size": h["lr"] / (1 - h["beta1"] ** step), **_moment_coefficients(h, step)}


def _moment_coefficients(h: Vectors, step: Tensor) -> dict[str, Tensor]:
    return {
        "root": (1 - h["beta2"] ** step).rsqrt(),
        "eps": h["eps"],
        "enter1": 1 - h["beta1"],
        "enter2": 1 - h["beta2"],
        "keep2": h["beta2"],
        "decay": h["weight_decay"],
        "shrink": 1 - h["lr"] * h["weight_decay"],
    }


def _adam(
    decoupled: bool, p: Tensor, g: Tensor, state: dict[str, Tensor], c: Vectors, common: Common
) -> None:
    _, mean, square = _moments(decoupled, p, g, state, c)
    if common["amsgrad"]:
        square = state["max_exp_avg_sq"].copy_(torch.maximum(state["max_exp_avg_sq"], square))
    p.sub_(mean / (square.sqrt() * c["root"] + c["eps"]) * c["size"])


def _moments(
    decoupled: bool, p: Tensor, g: Tensor, state: dict[str, Tensor], c: Vectors
) -> tuple[Tensor, Tensor, Tensor]:
    """Weight decay, then the new averages of the gradient and its square; also returns the gradient.

    In the precision of the coefficients, as torch computes within a kernel.
    """
    if decoupled:
        p.mul_(c["shrink"])
    else:
        g = g + c["decay"] * p
    precision = c["enter1"].dtype
    g, mean, square = (x.to(precision) for x in (g, state["exp_avg"], state["exp_avg_sq"]))
    mean.lerp_(g, c["enter1"])
    square.mul_(c["keep2"]).addcmul_(g, g * c["enter2"])
    for name, computed in (("exp_avg", mean), ("exp_avg_sq", square)):
        if state[name] is not computed:
            state[name].copy_(computed)
    return g, mean, square


def _adam_pass(decoupled: bool, updated: Iterable[WithState], table: Tensor, common: Common) -> None:
    from plait.fusion.kernels.update import adam  # needs Triton

    adam(((p, g, state["exp_avg"], state["exp_avg_sq"]) for p, g, state in updated), table, decoupled)


def _nadam_coefficients(h: Vectors, clock: StepClock) -> dict[str, Tensor]:
    step = clock.steps.double() + 1
    mu, mu_next = nadam_momentum(h, torch.stack([step, step + 1]))
    # As the clock's will be, and as torch rounds it.
    product = (clock.mu_product * mu.to(clock.mu_product.dtype)).double()
    return {
        "push": h["lr"] * (1 - mu) / (1 - product),
        "size": h["lr"] * mu_next / (1 - product * mu_next),
        **_moment_coefficients(h, step),
    }


def _nadam(p: Tensor, g: Tensor, state: dict[str, Tensor], c: Vectors, common: Common) -> None:
    g, mean, square = _moments(common["decoupled_weight_decay"], p, g, state, c)
    p.sub_((g * c["push"]).addcmul_(mean, c["size"]) / (square.sqrt() * c["root"] + c["eps"]))


def _lion_coefficients(h: Vectors, clock: StepClock) -> dict[str, Tensor]:
    return {
        **h,
        "turn": 1 - h["beta1"],
        "enter": 1 - h["beta2"],
        "shrink": 1 - h["lr"] * h["weight_decay"],
    }


def _lion(p: Tensor, g: Tensor, state: dict[str, Tensor], c: Vectors, common: Common) -> None:
    g, mean = g.to(c["lr"].dtype), state["exp_avg"].to(c["lr"].dtype)
    direction = mean.lerp(g, c["turn"]).sign_()
    p.mul_(c["shrink"]).sub_(direction * c["lr"])
    mean.lerp_(g, c["enter"])
    if state["exp_avg"] is not mean:
        state["exp_avg"].copy_(mean)


def _rmsprop_states(h: Mapping[str, Sequence[float]], common: Common, dim: int) -> list[str]:
    momentum = ["momentum_buffer"] if any(h["momentum"]) else []
    return ["square_avg", *momentum, *(["grad_avg"] if common["centered"] else [])]


def _rmsprop_coefficients(h: Vectors, clock: StepClock) -> dict[str, Tensor]:
    return {**h, "enter": 1 - h["alpha"], "push": torch.ones_like(h["lr"])}


def _rmsprop(p: Tensor, g: Tensor, state: dict[str, Tensor], c: Vectors, common: Common) -> None:
    g = g + c["weight_decay"] * p
    square = state["square_avg"]
    square.mul_(c["alpha"]).add_(g * g * c["enter"])
    centre = square
    if common["centered"]:
        mean = state["grad_avg"]
        mean.add_((g - mean) * c["enter"])
        centre = square - mean * mean
    change = g / (centre.sqrt() + c["eps"])
    if "momentum_buffer" in state:
        change = state["momentum_buffer"].mul_(c["momentum"]).add_(change * c["push"])
    p.sub_(change * c["lr"])


def _adagrad_start(h: Vectors, parameter: Tensor, name: str) -> Tensor:
    start = h["initial_accumulator_value"]
    start = (torch.complex(start, start) if parameter.is_complex() else start).to(parameter.dtype)
    return torch.zeros_like(parameter, requires_grad=False) + of_trials(start, parameter)


def _adagrad(p: Tensor, g: Tensor, state: dict[str, Tensor], c: Vectors, common: Common) -> None:
    g = g + c["weight_decay"] * p
    total = state["sum"]
    total.add_(g * g)
    p.sub_(g / (total.sqrt() + c["eps"]) * c["lr"])


def _adadelta(p: Tensor, g: Tensor, state: dict[str, Tensor], c: Vectors, common: Common) -> None:
    g = g + c["weight_decay"] * p
    square, moved = state["square_avg"], state["acc_delta"]
    square.mul_(c["rho"]).add_(g * g * c["enter"])
    change = (moved + c["eps"]).sqrt() / (square + c["eps"]).sqrt() * g
    moved.mul_(c["rho"]).add_(change * change * c["enter"])
    p.sub_(change * c["lr"])


def _adam_kind(
    torch_class: type[torch.optim.Optimizer], weight_decay: float, fused: Any, decoupled: bool
) -> OptimizerKind:
    """Adam, with its weight decay in the gradient or, `decoupled`, applied to the weights."""
    return OptimizerKind(
        torch_class,
        {**_ADAMS, "weight_decay": weight_decay},
        lambda h, common, dim: ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if common["amsgrad"] else [])],
        _adam_coefficients,
        partial(_adam, decoupled),
        {"amsgrad": False, "maximize": False},
        _BETAS,
        keeping=frozenset(("keep2", "shrink", "root", "eps")),
        kernel=fused,
        kernel_states=("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"),
        one_pass=partial(_adam_pass, decoupled),
    )


KINDS: Mapping[str, OptimizerKind] = {
    "sgd": OptimizerKind(
        torch.optim.SGD,
        {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0},
        lambda h, common, dim: ["momentum_buffer"] if any(h["momentum"]) else [],
        _sgd_coefficients,
        _sgd,
        {"nesterov": False, "maximize": False},
        counts_steps=False,
        has_step=False,
        keeping=frozenset(("keep",)),
        kernel=_sgd_kernel,
        kernel_states=("momentum_buffer",),
    ),
    "adam": _adam_kind(torch.optim.Adam, 0.0, torch._fused_adam_, decoupled=False),
    "adamw": _adam_kind(torch.optim.AdamW, 1e-2, torch._fused_adamw_, decoupled=True),
    "rmsprop": OptimizerKind(
        torch.optim.RMSprop,
        {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0},
        _rmsprop_states,
        _rmsprop_coefficients,
        _rmsprop,
        {"centered": False, "maximize": False},
        keeping=frozenset(("alpha", "eps", "momentum")),
    ),
    "adagrad": OptimizerKind(
        torch.optim.Adagrad,
        {"lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10},
        lambda h, common, dim: ["sum"],
        lambda h, clock: {**h, "lr": h["lr"] / (1 + clock.steps * h["lr_decay"])},
        _adagrad,
        {"maximize": False},
        keeping=frozenset(("eps",)),
        first_state=_adagrad_start,
    ),
    "adadelta": OptimizerKind(
        torch.optim.Adadelta,
        {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.0},
        lambda h, common, dim: ["square_avg", "acc_delta"],
        lambda h, clock: {**h, "enter": 1 - h["rho"]},
        _adadelta,
        {"maximize": False},
        keeping=frozenset(("rho", "eps")),
    ),
    "nadam": OptimizerKind(
        torch.optim.NAdam,
        {**_ADAMS, "lr": 2e-3, "momentum_decay": 4e-3},
        lambda h, common, dim: ["exp_avg", "exp_avg_sq"],
        _nadam_coefficients,
        _nadam,
        {"decoupled_weight_decay": False, "maximize": False},
        _BETAS,
        keeping=frozenset(("keep2", "shrink", "root", "eps")),
    ),
    "lion": OptimizerKind(
        Lion,
        {"lr": 1e-4, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0},
        lambda h, common, dim: ["exp_avg"],
        _lion_coefficients,
        _lion,
        {"maximize": False},
        _BETAS,
        has_step=False,
        keeping=frozenset(("shrink",)),
    ),
    "adafactor": ADAFACTOR,
    "muon": MUON,
}


def kind_of(optimizer: torch.optim.Optimizer) -> str | None:
    """The name of the kind that implements this torch optimizer, or None."""
    names: dict[Any, str] = {kind.torch_class: name for name, kind in KINDS.items()}
    return names.get(type(optimizer))
