"""Optimizers whose update of an element depends on the whole matrix of its trial: Adafactor and Muon."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from plait.fusion.dispatch.per_trial import of_trials
from plait.fusion.optim.kind import Common, OptimizerKind, Vectors
from plait.fusion.optim.step_clock import StepClock


def _adafactor_states(h: Mapping[str, Sequence[float]], common: Common, dim: int) -> list[str]:
    return ["row_var", "col_var"] if dim > 1 else ["variance"]


def _adafactor_start(h: Vectors, parameter: Tensor, name: str) -> Tensor:
    shape = list(parameter.shape)
    if name != "variance":
        shape[-1 if name == "row_var" else -2] = 1
    return parameter.new_zeros(shape, requires_grad=False)


def _adafactor_coefficients(h: Vectors, clock: StepClock) -> dict[str, Tensor]:
    step = clock.steps.double() + 1
    return {
        **h,
        "size": torch.minimum(h["lr"], step.rsqrt()),
        "enter": step ** h["beta2_decay"],
        "shrink": 1 - h["lr"] * h["weight_decay"],
    }


def _adafactor(p: Tensor, g: Tensor, state: dict[str, Tensor], c: Vectors, common: Common) -> None:
    precision = c["enter"].dtype
    g, wide = g.to(precision), {name: state[name].to(precision) for name in state if name in _MOMENTS}
    size = torch.maximum(c["eps2"], _rms(p.to(precision))) * c["size"]
    p.mul_(c["shrink"])
    if "variance" in wide:
        variance = wide["variance"].lerp_(g * g, c["enter"])
    else:
        for name, axis in (("row_var", -1), ("col_var", -2)):
            norms = torch.linalg.vector_norm(g, dim=axis, keepdim=True)
            wide[name].lerp_(norms.square_().div_(g.shape[axis]), c["enter"])
        rows = wide["row_var"]
        variance = rows @ wide["col_var"]
        variance.div_(torch.maximum(rows.mean(-2, keepdim=True), c["eps1"]))
    for name, computed in wide.items():
        if state[name] is not computed:
            state[name].copy_(computed)
    change = torch.maximum(variance, c["eps1"].square()).rsqrt_().mul_(g)
    p.sub_(change.mul_(size / (_rms(change) / c["d"]).clamp_(min=1.0)))


_MOMENTS = ("row_var", "col_var", "variance")


def _rms(x: Tensor) -> Tensor:
    """The root mean square of each trial, with an axis of size 1 for each of a parameter's."""
    size = x[0].numel()
    norms: Tensor = torch.linalg.vector_norm(x.reshape(x.shape[0], size), dim=1).div_(math.sqrt(size))
    return of_trials(norms, x)


def _muon_coefficients(h: Vectors, clock: StepClock) -> dict[str, Tensor]:
    return {**h, "enter": 1 - h["momentum"], "shrink": 1 - h["lr"] * h["weight_decay"]}


def _muon(p: Tensor, g: Tensor, state: dict[str, Tensor], c: Vectors, common: Common) -> None:
    precision, buffer = c["enter"].dtype, state["momentum_buffer"]
    g = g.to(precision)
    buffer.copy_(buffer.to(precision).lerp(g, c["enter"]))
    pushed = g.lerp(buffer.to(precision), c["momentum"]) if common["nesterov"] else buffer
    direction = orthogonalized(
        pushed.to(p.dtype), tuple(common["ns_coefficients"]), common["ns_steps"], c["eps"]
    )
    p.mul_(c["shrink"]).sub_(
        direction.to(precision) * (c["lr"] * _adjust_lr(1.0, common["adjust_lr_fn"], p.shape[1:]))
    )


def orthogonalized(
    x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: Tensor, batched: bool | None = None
) -> Tensor:
    """Each trial's matrix, orthogonalized by Newton-Schulz iterations in bfloat16; `eps` is one per trial.

    On a CPU trial by trial, as products of bfloat16 matrices in a batch may be rounded differently there.
    """
    if not (x.is_cuda if batched is None else batched):
        each = zip(x, eps.flatten().tolist())
        return torch.stack([_zeropower_via_newtonschulz(one, coefficients, steps, e) for one, e in each])
    a, b, c = coefficients
    is_tall = x.shape[1] > x.shape[2]
    y = x.bfloat16()
    y = y.mT if is_tall else y
    norms = torch.linalg.vector_norm(y, dim=(1, 2), keepdim=True)
    y = y / torch.maximum(norms, eps.to(norms.dtype))
    for _ in range(steps):
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.mT if is_tall else y


def _only_real(parameter: Tensor) -> str | None:
    return "complex numbers" if parameter.is_complex() else None


def _only_matrices(parameter: Tensor) -> str | None:
    if parameter.dim() != 3:
        return (
            f"a parameter of shape {tuple(parameter.shape[1:])} of each trial, expected matrices; give the "
            f"others to another FusedOptimizer, by params"
        )
    return _only_real(parameter)


ADAFACTOR = OptimizerKind(
    torch.optim.Adafactor,
    {"lr": 1e-2, "beta2_decay": -0.8, "eps1": None, "eps2": 1e-3, "d": 1.0, "weight_decay": 0.0},
    _adafactor_states,
    _adafactor_coefficients,
    _adafactor,
    {"maximize": False},
    {"eps": ("eps1", "eps2")},
    unset={"eps1": lambda dtype: torch.finfo(dtype).eps},
    keeping=frozenset(("eps1", "d", "shrink")),
    first_state=_adafactor_start,
    is_elementwise=False,
    objection=_only_real,
)
MUON = OptimizerKind(
    torch.optim.Muon,
    {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "eps": 1e-7},
    lambda h, common, dim: ["momentum_buffer"],
    _muon_coefficients,
    _muon,
    {
        "nesterov": True,
        "ns_coefficients": (3.4445, -4.775, 2.0315),
        "ns_steps": 5,
        "adjust_lr_fn": None,
    },
    has_step=False,
    keeping=frozenset(("eps", "shrink")),
    objection=_only_matrices,
    is_elementwise=False,
)
