"""`fuse`: K models in, one module that trains them all out, compared with the models alone where asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from plait.fusion.check import check_models
from plait.fusion.errors import FusionError
from plait.fusion.module import FusedModule
from plait.fusion.verify import BatchRehearsal, log_verdict, verify_fused


def fuse(
    models: Sequence[nn.Module],
    seeds: Sequence[int] | None = None,
    ages: Sequence[int] | None = None,
    unfused: Iterable[str] | Mapping[str, str] = (),
    verify: Sequence[Any] | None = None,
) -> FusedModule:
    """One module that computes, and trains, all of `models` at once; the models stay as they are.

    The models have the same shapes; float attributes that differ (a dropout's `p`) become hyperparameters of
    the trials. `seeds` are the trials' random streams (0, 1, 2... where none are given), `ages` how many
    training forwards each has behind it. Submodules named in `unfused` run trial by trial; "" names them all.

    With `verify`, one batch or two that the plain models take (a tensor, a tuple of positional or a dict of
    named arguments), the trials are first compared with the models alone: outputs, gradients and buffers in
    training and evaluation. Modules that cannot be fused rightly then run trial by trial, which
    `FusedModule.unfused` lists; models for which even that is not right are refused.
    """
    is_list = isinstance(models, Iterable) and not (
        isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList)
    )
    if not is_list:
        raise FusionError(
            f"fuse: found a {type(models).__name__}, expected a list of models of the same shape, such as "
            f"[make_model() for _ in range(4)]"
        )
    models = list(models)
    check_models(models)
    count = len(models)
    seeds = list(range(count)) if seeds is None else list(seeds)
    ages = [0] * count if ages is None else list(ages)
    for what, given in (("seeds", seeds), ("ages", ages)):
        if len(given) != count:
            raise FusionError(f"fuse: found {len(given)} {what} for {count} models, expected one each")
    reasons = dict(unfused) if isinstance(unfused, Mapping) else dict.fromkeys(unfused, "as asked")
    if verify is not None:
        reasons = _verified(models, seeds, ages, reasons, verify)
    return FusedModule(models, seeds, ages, reasons)


def _verified(
    models: Sequence[nn.Module],
    seeds: Sequence[int],
    ages: Sequence[int],
    unfused: Mapping[str, str],
    batches: Sequence[Any],
) -> dict[str, str]:
    """The submodules that must run trial by trial, and why."""
    listed = [batches] if isinstance(batches, (Tensor, Mapping)) else batches
    verdict = verify_fused(BatchRehearsal(models, seeds, ages, listed), unfused)
    if verdict.refused is not None:
        raise FusionError(f"fuse: these models cannot be fused: {verdict.refused}; train each alone")
    log_verdict(verdict, unfused)
    return dict(verdict.unfused)
