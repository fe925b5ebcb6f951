"""`fuse`: K models in, one module that trains them all out, verified against the models at its first call."""

from __future__ import annotations

import gc
import logging
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from plait.fusion.check import check_models
from plait.fusion.dispatch.random import unused_seeds
from plait.fusion.dispatch.tensor import TrialTensor
from plait.fusion.errors import FusionError
from plait.fusion.module import FusedModule
from plait.fusion.shared_input import Shared
from plait.fusion.sharing import check_share, held_once, nearly_shared
from plait.fusion.trials.adapter_forms import in_one_form
from plait.fusion.verify import CallCandidate, NothingToCompareError, calls_on, log_report, verify_fused
from plait.workloads.adapters.forms import is_adapted

log = logging.getLogger(__name__)

# Of each fused module that is still there: its first model, and those of its parts that have parameters.
_made: WeakKeyDictionary[FusedModule, tuple[ReferenceType[nn.Module], WeakSet[nn.Module]]] = (
    WeakKeyDictionary()
)


def fuse(
    models: Sequence[nn.Module],
    seeds: Sequence[int] | None = None,
    rng_steps: Sequence[int] | None = None,
    unfused: Iterable[str] | Mapping[str, str] = (),
    verify: bool | Sequence[Any] = True,
    share: str = "auto",
) -> FusedModule:
    """One module that computes, and trains, all of `models` at once; the models are not changed.

    The models have the same shapes; float attributes that differ (a dropout's `p`) become hyperparameters of
    the trials. Adapters of the PEFT library may differ in rank, scale, dropout and in the layers they adapt.
    `seeds` select the trials' random streams (default 0, 1, 2..., going on with the next fused module of the
    process), `rng_steps` how many training forwards each has done. Submodules named in `unfused` run trial by
    trial; "" names the whole model.

    The first call of the fused module compares its trials with the models, on the call's arguments: outputs,
    gradients and buffers in training and evaluation mode. Modules that compute something else when fused run
    trial by trial from then on; `FusedModule.unfused` lists them. If even that does not give the same result,
    FusionError is raised. The comparison runs a few steps of each model, and needs memory for a second array,
    or for parts of it one after the other; the models are kept until then. With `verify=False` nothing is
    compared. `verify` can also be one or two batches for the plain models (a tensor, a tuple of positional or
    a dict of named arguments), on which the trials are compared at once.

    What all models have and none trains is held once: `FusedModule.shared`. With `share="auto"` that is
    frozen parameters and buffers with equal values, with "parameters" no buffers, with "same-storage" those
    that are one tensor in all models, with "never" nothing. Its memory is that of the first model. A tensor
    that a forward writes to is not shared from then on; a shared parameter must be unshared
    (`FusedModule.unshare`) before it is trained.

    Examples:
        ```python
        models = [nn.Sequential(nn.Linear(8, 4), nn.Dropout(p), nn.Linear(4, 1)) for p in (0.0, 0.1, 0.5)]
        fused = plait.fuse(models)
        fused(torch.randn(3, 16, 8)).shape  # (3, 16, 1): a batch for each trial
        ```
    """
    check_share(share)
    is_list = isinstance(models, Iterable) and not (
        isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList)
    )
    if not is_list:
        raise FusionError(
            f"fuse: found a {type(models).__name__}, expected a list of models of the same shape, such as "
            f"[make_model() for _ in range(4)]"
        )
    originals = list(models)
    models, forms = in_one_form(originals)
    check_models(models)
    count = len(models)
    seeds = unused_seeds(count) if seeds is None else list(seeds)
    rng_steps = [0] * count if rng_steps is None else list(rng_steps)
    for what, given in (("seeds", seeds), ("rng_steps", rng_steps)):
        if len(given) != count:
            raise FusionError(f"fuse: found {len(given)} {what} for {count} models, expected one each")
    reasons = dict(unfused) if isinstance(unfused, Mapping) else dict.fromkeys(unfused, "as asked")
    shared = held_once(models, share)
    made = FusedModule(models, seeds, rng_steps, reasons, shared)
    made.unlike_base = nearly_shared(models, shared) if shared and share != "same-storage" else []
    made.set_forms(forms)
    _warn_of_untied(made, originals[0])
    if is_adapted(models[0]):
        _warn_of_adapters(made)
    if verify is True:
        made.first_call, made.plain_models = _verify_call, models
    elif verify is not False:
        batches = [verify] if isinstance(verify, (Tensor, Mapping)) else verify
        _verify(made, CallCandidate(made, models, operator.call, *calls_on(batches, count)))
    return made


def _warn_of_adapters(fused: FusedModule) -> None:
    """Warn of adapters that will not be trained, and of those that have no common base."""
    if not any(parameter.requires_grad for parameter in fused.module.parameters()):
        log.warning(
            "these adapters are frozen, so that nothing will be trained; load them with is_trainable=True, "
            "or make them without inference_mode=True"
        )
    elif fused.unlike_base:
        log.warning(
            "the bases of these adapters differ, in %s for one, so that each trial has its own; load all "
            "adapters on one base to hold it once",
            fused.unlike_base[0],
        )


def _warn_of_untied(fused: FusedModule, model: nn.Module) -> None:
    """Warn of weights that models of another fused module have, too, which each of the two would train."""
    if names := _fused_elsewhere(model):
        gc.collect()  # modules that are in use no more
        names = _fused_elsewhere(model)
    with_weights = (part for part in model.modules() if any(True for _ in part.parameters(recurse=False)))
    _made[fused] = ref(model), WeakSet(with_weights)
    if names:
        log.warning(
            "%s%s: the models of another fused module have the same, and as each of the two trains separate "
            "weights, they are tied no more; to keep them tied, fuse modules that hold both",
            names[0],
            f" and {len(names) - 1} more" if len(names) > 1 else "",
        )


def _fused_elsewhere(model: nn.Module) -> list[str]:
    """Names of trained parameters that other models have, too, whose fused module is still there."""
    elsewhere = {
        id(parameter)
        for other, parts in _made.values()
        if other() is not model  # which is fused once more
        for part in parts
        for parameter in part.parameters(recurse=False)
    }
    return [name for name, p in model.named_parameters() if p.requires_grad and id(p) in elsewhere]


def _verify(fused: FusedModule, candidate: CallCandidate) -> None:
    """Compare a fused module with its models, and unfuse the submodules that must run trial by trial."""
    unfused = fused.unfused
    report = verify_fused(candidate, unfused)
    if report.refused is not None:
        raise FusionError(f"fuse: these models cannot be fused: {report.refused}; train each alone")
    log_report(report, unfused)
    log.info(
        "compared %d fused trials with the single models in %.1f s; fuse(..., verify=False) skips this",
        len(candidate.models),
        report.seconds,
    )
    for name, why in report.unfused.items():
        if name not in unfused:
            fused.unfuse(name, why, candidate.models)


def _verify_call(fused: FusedModule, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Compare the trials on these arguments, or at a later call if models cannot be run twice here."""
    if _cannot_compare(fused, pytree.tree_leaves((args, kwargs))):
        fused.first_call = _verify_call
        return
    models, fused.plain_models = fused.plain_models, []
    # Even in inference mode or under no_grad, gradients are compared.
    with torch.inference_mode(False), torch.enable_grad():
        call = _plain((args, kwargs))
        try:
            # The same call twice, as the models may not accept others.
            _verify(fused, CallCandidate(fused, models, function, (call, call)))
        except NothingToCompareError as failure:
            log.warning("fused trials were not verified: %s", failure)


def _plain(values: Any) -> Any:
    """The arguments, with tensors that autograd can use."""

    def plain(x: Any) -> Any:
        if isinstance(x, Shared):
            return Shared(plain(x.tensor))
        return x.clone() if isinstance(x, Tensor) and x.is_inference() else x

    return pytree.tree_map(plain, values)


def _cannot_compare(fused: FusedModule, leaves: Sequence[Any]) -> bool:
    """Whether the call is being traced, captured or transformed, so that models cannot be run in it."""
    tensors = [x.tensor if isinstance(x, Shared) else x for x in leaves if isinstance(x, (Tensor, Shared))]
    if any(isinstance(x, (FakeTensor, TrialTensor)) or x.is_meta for x in tensors) or fused.is_padded:
        return True
    if torch.compiler.is_compiling() or peek_interpreter_stack() is not None:
        return True
    if _get_current_dispatch_mode_stack():  # tracing, or fake tensors
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
