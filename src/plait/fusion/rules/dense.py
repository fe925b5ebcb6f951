"""Products with weights: one batched matrix product for all trials, or one wide product for shared inputs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.fusion.dispatch.fallback import loop, vmap_rule
from plait.fusion.dispatch.registry import Arguments, Function, Options, arguments_of, rule
from plait.fusion.dispatch.tensor import Trials, TrialTensor, trials_of, unwrap, wrap
from plait.fusion.errors import FusionError, user_line
from plait.fusion.rules.elementwise import align_operand
from plait.fusion.speed.dense_layers import dense
from plait.fusion.speed.lazy_rows import pending_dense, read_by_dense
from plait.fusion.speed.tied_rows import Tables, can_collect


@rule("linear")
def linear(function: Function, args: Arguments, kwargs: Options) -> Any:
    given = arguments_of("input weight bias", {"bias": None}, args, kwargs)
    x, weight, bias = given["input"], given["weight"], given["bias"]
    if not isinstance(weight, TrialTensor):
        trials = trials_of(x, bias)
        shared = None if isinstance(bias, TrialTensor) else bias
        if isinstance(x, TrialTensor):
            product = wrap(rows_linear(x.stacked, weight, shared), trials)
        else:
            product = F.linear(x, weight, shared)
        return product if shared is bias else product + bias
    if weight.dim() != 2 or x.dim() == 0:
        return vmap_rule(function, args, kwargs)
    trials, of_each = weight.trials, weight.stacked
    if trials.tables is not None:
        of_each = trials.tables.shared(of_each)
    if not isinstance(x, TrialTensor):
        return TrialTensor(_shared_input(x, of_each, bias, trials), trials)
    inner = x.stacked if x.pending is None else read_by_dense(x)
    own = None if bias is None else bias.stacked if isinstance(bias, TrialTensor) else unwrap(bias, trials)
    pending = pending_dense(inner, of_each, own)
    if pending is not None:
        return TrialTensor(pending.like, trials, pending)
    return TrialTensor(batched_linear(inner, of_each, own), trials)


def rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b with one weight for all trials: one product, the rows of all trials are its batch."""
    if x.dim() < 3 or weight.dim() != 2:
        return F.linear(x, weight, bias)
    # Torch would expand the weight if the rows are not contiguous.
    return F.linear(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], len(weight))


def batched_linear(x_tbc: Tensor, weight_toc: Tensor, bias_to: Tensor | None) -> Tensor:
    """x W^T + b for each trial; axes between trials and channels are flattened to one batch.

    A weight or a bias that all trials share has no trials axis.
    """
    if weight_toc.dim() == 2:
        shared = None if bias_to is None or bias_to.dim() > 1 else bias_to
        product = rows_linear(x_tbc, weight_toc, shared)
        if bias_to is None or shared is not None:
            return product
        return product + bias_to.view(len(bias_to), *(1,) * (product.dim() - 2), -1)
    if bias_to is not None and bias_to.dim() == 1:
        bias_to = bias_to.expand(len(x_tbc), -1)
    count, middle = x_tbc.shape[0], x_tbc.shape[1:-1]
    flat = x_tbc if len(middle) == 1 else x_tbc.reshape(count, -1, x_tbc.shape[-1])
    product = dense(flat, weight_toc, bias_to)
    return product if len(middle) == 1 else product.reshape(count, *middle, product.shape[-1])


def _shared_input(x: Tensor, weight_toc: Tensor, bias: Any, trials: Trials) -> Tensor:
    """One product of a shared input with the stacked weights of all trials."""
    flat_bias = None if bias is None else unwrap(bias, trials).reshape(-1)
    product = F.linear(x, weight_toc.flatten(0, 1), flat_bias)
    return product.view(*product.shape[:-1], trials.count, -1).movedim(-2, 0)


@rule("bilinear")
def bilinear(function: Function, args: Arguments, kwargs: Options) -> Any:
    given = arguments_of("input1 input2 weight bias", {"bias": None}, args, kwargs)
    trials = trials_of(*given.values())
    left, right = unwrap(given["input1"], trials), unwrap(given["input2"], trials)
    middle = left.shape[1:-1]
    left, right = (
        left.reshape(trials.count, -1, left.shape[-1]),
        right.reshape(trials.count, -1, right.shape[-1]),
    )
    weight = unwrap(given["weight"], trials)
    rows = torch.einsum("tbi,toij->tboj", left, weight)
    product = (rows @ right.unsqueeze(-1)).squeeze(-1)
    if given["bias"] is not None:
        product = product + unwrap(given["bias"], trials).unsqueeze(1)
    return wrap(product.view(trials.count, *middle, -1), trials)


@rule("matmul", "__matmul__", "bmm", "mm", "__rmatmul__")
def matmul(function: Function, args: Arguments, kwargs: Options) -> Any:
    """Batched products; products with vectors use vmap."""
    if len(args) + len(kwargs) != 2:
        return loop(function, args, kwargs)
    left, right = args if len(args) > 1 else (args[0], next(iter(kwargs.values())))
    if function.__name__ == "__rmatmul__":
        left, right = right, left
    if left.dim() < 2 or right.dim() < 2:
        return vmap_rule(torch.matmul, (left, right), {})
    trials = trials_of(left, right)
    if right.dim() == 2 and not isinstance(right, TrialTensor):  # one product for all trials
        return wrap(rows_linear(left.stacked, right.mT, None), trials)
    dims = max(left.dim(), right.dim())
    like = left if isinstance(left, TrialTensor) else right
    return wrap(torch.matmul(align_operand(left, dims, like), align_operand(right, dims, like)), trials)


@rule("addmm", "baddbmm")
def add_product(function: Function, args: Arguments, kwargs: Options) -> Any:
    if len(args) != 3 or kwargs:
        return vmap_rule(function, args, kwargs)
    bias, left, right = args
    if right.dim() == 2 and bias.dim() == 1 and not any(isinstance(x, TrialTensor) for x in (bias, right)):
        return linear(F.linear, (left, right.mT, bias), {})
    if type(left) is type(right) is type(bias) is TrialTensor and (left.dim(), right.dim()) == (2, 2):
        offset = align_operand(bias, 2, bias)
        return TrialTensor(torch.baddbmm(offset, left.stacked, right.stacked), left.trials)
    return bias + torch.matmul(left, right)


@rule("embedding")
def embedding(function: Function, args: Arguments, kwargs: Options) -> Any:
    """One lookup in the stacked tables of all trials."""
    names = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
    defaults = {"padding_idx": None, "max_norm": None, "scale_grad_by_freq": False, "sparse": False}
    given = arguments_of(names, defaults, args, kwargs)
    weight, padding = given["weight"], given["padding_idx"]
    trials = trials_of(given["input"], weight)
    if not isinstance(weight, TrialTensor):
        options = {k: v for k, v in given.items() if k not in ("input", "weight")}
        return wrap(F.embedding(given["input"].stacked, weight, **options), trials)
    if given["sparse"]:
        raise FusionError(f"{user_line()}\n  has sparse gradients; a fused model needs sparse=False")
    if given["max_norm"] is not None:
        _limit_norms(weight, given)
        given["max_norm"] = None
    if given["scale_grad_by_freq"]:
        return loop(F.embedding, (), given)
    rows, index = _rows(weight, given["input"])
    if can_collect(weight.stacked):
        trials.tables = trials.tables or Tables()
        looked_up = trials.tables.look_up(weight.stacked, index)
    else:
        looked_up = F.embedding(index, rows)
    if padding is not None:
        # Each trial has a padding row; torch's function supports only one row with zero gradient.
        at_padding = (unwrap(given["input"], trials) == padding % weight.shape[0]).unsqueeze(-1)
        looked_up = torch.where(at_padding, looked_up.detach(), looked_up)
    return wrap(looked_up, trials)


@torch.no_grad()
def _limit_norms(weight: TrialTensor, given: Options) -> None:
    """Renormalize the selected rows to `max_norm`, as torch does in place before the lookup."""
    norm_type = given.get("norm_type", 2.0)
    tables = []
    for number, table in enumerate(weight.stacked.detach().unbind()):
        index = given["input"].stacked[number] if isinstance(given["input"], TrialTensor) else given["input"]
        tables.append(table.clone(memory_format=torch.contiguous_format))
        torch.embedding_renorm_(tables[-1], index.contiguous(), given["max_norm"], norm_type)
    weight.stacked.detach().copy_(torch.stack(tables))


def _rows(weight: TrialTensor, index: Tensor) -> tuple[Tensor, Tensor]:
    count, rows = weight.stacked.shape[:2]
    offsets = torch.arange(0, count * rows, rows, device=weight.device, dtype=index.dtype)
    inner = index.stacked if isinstance(index, TrialTensor) else index.unsqueeze(0)
    indices = inner + offsets.view(-1, *(1,) * (inner.dim() - 1))
    # An index out of a trial's range must not select a row of the next trial: make it invalid.
    indices = torch.where((inner >= 0) & (inner < rows), indices, count * rows)
    return weight.stacked.flatten(0, 1), indices


@rule("embedding_bag")
def embedding_bag(function: Function, args: Arguments, kwargs: Options) -> Any:
    """One call on the stacked tables; offsets and rare options trial by trial."""
    names = (
        "input weight offsets max_norm norm_type scale_grad_by_freq mode sparse per_sample_weights "
        "include_last_offset padding_idx"
    )
    given = arguments_of(names, {}, args, kwargs)
    bags, weight = given["input"], given["weight"]
    if given.get("sparse"):
        raise FusionError(f"{user_line()}\n  has sparse gradients; a fused model needs sparse=False")
    if given.get("max_norm") is not None and isinstance(weight, TrialTensor):
        _limit_norms(weight, given)
        given["max_norm"] = None
    plain = not any(given.get(k) for k in ("max_norm", "scale_grad_by_freq", "sparse", "include_last_offset"))
    folds = bags.dim() == 2 and given.get("padding_idx") is None
    if not plain or not folds:
        return loop(F.embedding_bag, (), given)
    trials = trials_of(bags, weight, given.get("per_sample_weights"))
    rows, index = _rows(weight, bags) if isinstance(weight, TrialTensor) else (weight, unwrap(bags, trials))
    weights = given.get("per_sample_weights")
    pooled = F.embedding_bag(
        index.flatten(0, 1),
        rows,
        mode=given.get("mode", "mean"),
        per_sample_weights=None if weights is None else unwrap(weights, trials).flatten(0, 1),
    )
    return wrap(pooled.unflatten(0, (trials.count, -1)), trials)
