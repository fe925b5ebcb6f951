"""While a fused model runs: random numbers on tensors that all trials share belong to the trials too."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from plait.fusion.fallback import refuse_random
from plait.fusion.registry import RULES, Arguments, Function, Options, spellings
from plait.fusion.rules.dropout import streams_of
from plait.fusion.rules.shapes import sizes
from plait.fusion.tensor import Trials, TrialTensor, leaves, unwrap, wrap

_DRAWS = frozenset(spellings(("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout")))
_LIKE = frozenset((torch.rand_like, torch.randn_like, F.feature_alpha_dropout))
_NEW = {torch.rand: "uniform", torch.randn: "normal"}
_REFUSED = frozenset(
    (*spellings(("randint", "randperm", "bernoulli", "multinomial", "normal", "poisson", "bernoulli_")),)
)


class TrialMode(TorchFunctionMode):
    """Sees each torch function of the model's forward before any tensor does."""

    def __init__(self, trials: Trials) -> None:
        super().__init__()
        self.trials = trials

    def __torch_function__(
        self, func: Function, types: Any, args: Arguments = (), kwargs: Options | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.trials.is_alone:
            return func(*args, **kwargs)
        if func in _DRAWS or func in _LIKE:
            return RULES[func](func, (self._own(args[0]), *args[1:]), kwargs)
        if func in _NEW:
            return self._new(_NEW[func], args, kwargs)
        if func in _REFUSED and not any(isinstance(leaf, TrialTensor) for leaf in leaves(args)):
            return refuse_random(func, args, kwargs)
        return func(*args, **kwargs)

    def _own(self, x: Tensor) -> TrialTensor:
        if isinstance(x, TrialTensor):
            return x
        own: TrialTensor = wrap(unwrap(x, self.trials), self.trials)
        return own

    def _new(self, kind: str, args: Arguments, kwargs: Options) -> TrialTensor:
        shape = sizes(args or (kwargs["size"],))
        draw = getattr(streams_of(self.trials), kind)
        return TrialTensor(draw(shape, kwargs.get("dtype") or torch.get_default_dtype()), self.trials)
