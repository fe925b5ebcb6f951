"""Random numbers other than those of dropout: each trial draws its own, the same ones as alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.fusion.dispatch.per_trial import PerTrial, on_device
from plait.fusion.dispatch.random import Streams
from plait.fusion.dispatch.refusals import refuse_random
from plait.fusion.dispatch.registry import (
    Arguments,
    Function,
    Options,
    arguments_of,
    rule,
    spellings,
    takes_per_trial,
)
from plait.fusion.dispatch.tensor import TrialTensor
from plait.fusion.rules.dropout import drawn
from plait.fusion.rules.elementwise import align_operand
from plait.fusion.rules.shapes import sizes


def _exponential(streams: Streams, shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
    """Positive numbers, whose logarithms are finite."""
    return -torch.log1p(-streams.uniform(shape, kind)).clamp(max=-(2.0**-25))


def _waits(streams: Streams, shape: tuple[int, ...]) -> Tensor:
    """The same with 48 random bits, for what is rare among several."""
    fine = streams.uniform(shape, torch.float64) * 2.0**-24
    return -torch.log1p(-(streams.uniform(shape, torch.float64) + fine)).clamp(max=-(2.0**-50))


_Numbers = Callable[[Streams, tuple[int, ...], torch.dtype], Tensor]
# Of functions that fill a tensor: their options, the numbers that are drawn, and what is made of these.
_FILLS: dict[str, tuple[Options, _Numbers, Callable[..., Tensor]]] = {
    "normal_": ({"mean": 0.0, "std": 1.0}, Streams.normal, lambda n, mean, std: n * std + mean),
    "uniform_": ({"from": 0.0, "to": 1.0}, Streams.uniform, lambda n, low, high: n * (high - low) + low),
    "exponential_": ({"lambd": 1.0}, _exponential, lambda n, rate: n / rate),
    "bernoulli_": ({"p": 0.5}, Streams.uniform, lambda n, p: n < p),
}
FILLS = frozenset(spellings(_FILLS))
# Functions of a tensor, which may be one that trials share.
OF_TENSORS = frozenset(
    spellings(["bernoulli", "multinomial", "normal", "rand_like", "randint_like", "randn_like"])
)
# Functions of sizes alone, one of them also of tensors.
NEW = frozenset((torch.normal, torch.rand, torch.randint, torch.randn, torch.randperm))

# Functions with draws inside, and those that torch implements in Python.
ATTENTION = frozenset(spellings(["scaled_dot_product_attention"]))
RECURRENT = frozenset(spellings(["lstm", "gru", "rnn_tanh", "rnn_relu"]))
OPENED = frozenset((F.gumbel_softmax, F.multi_head_attention_forward))


def is_new(function: Function, args: Arguments, kwargs: Options) -> bool:
    """Whether a call is one of `NEW` without tensors."""
    return function in NEW and not any(isinstance(value, Tensor) for value in (*args, *kwargs.values()))


def with_tensor(
    wrap: Callable[[Tensor], TrialTensor], args: Arguments, kwargs: Options
) -> tuple[Arguments, Options]:
    """The arguments of a call, the first tensor among them wrapped if none is a trial tensor."""
    if (args and type(args[0]) is TrialTensor) or TrialTensor in map(type, (*args, *kwargs.values())):
        return args, kwargs
    places = [at for at, value in enumerate(args) if isinstance(value, Tensor)]
    if places:
        at = places[0]
        return (*args[:at], wrap(args[at]), *args[at + 1 :]), kwargs
    name = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
    return args, {**kwargs, name: wrap(kwargs[name])}


@takes_per_trial
@rule(*_FILLS)
def fill(function: Function, args: Arguments, kwargs: Options) -> Any:
    """A tensor whose elements become random numbers."""
    defaults, draw, make = _FILLS[function.__name__]
    given = arguments_of(f"input {' '.join(defaults)}", defaults, args, kwargs)
    x, options = given["input"], [given[name] for name in defaults]
    if not isinstance(x, TrialTensor):
        return refuse_random(function, args, kwargs)
    if (generator := given.get("generator")) is not None:  # whose numbers are the same for all trials
        x.stacked.copy_(function(torch.empty_like(x.stacked[0]), *options, generator=generator))
        return x
    if not any(isinstance(value, (PerTrial, Tensor)) for value in options):
        # Torch says what is wrong.
        function(torch.empty(1, dtype=x.dtype), *options, generator=torch.Generator())
    placed = [align_operand(value, x.dim(), x) for value in options]
    kind = torch.promote_types(x.dtype, torch.float32)
    own = x.dtype if function.__name__ == "uniform_" else kind  # less than 1 when it is rounded
    numbers = drawn(x, tuple(x.shape), lambda streams, shape: draw(streams, shape, own))
    x.stacked.copy_(make(numbers.to(kind), *placed))
    return x


@rule("rand_like", "randn_like")
def random_like(function: Function, args: Arguments, kwargs: Options) -> Any:
    x, kind = args[0], kwargs.get("dtype") or args[0].dtype
    if kwargs.get("generator") is not None:  # whose numbers are the same for all trials
        return function(x.stacked[0], **kwargs)
    draw = Streams.uniform if function.__name__ == "rand_like" else Streams.normal
    numbers = drawn(x, tuple(x.shape), lambda streams, shape: draw(streams, shape, kind))
    return TrialTensor(numbers.requires_grad_(bool(kwargs.get("requires_grad"))), x.trials)


@rule("randint_like")
def integers_like(function: Function, args: Arguments, kwargs: Options) -> Any:
    x, *limits = args
    if kwargs.get("generator") is not None:
        return function(x.stacked[0], *limits, **kwargs)
    low, high = _limits(limits, kwargs)
    numbers = drawn(x, tuple(x.shape), lambda streams, shape: streams.integers(shape, low, high))
    return TrialTensor(numbers.to(kwargs.get("dtype") or x.dtype), x.trials)


def _limits(limits: Any, kwargs: Options) -> tuple[int, int]:
    """Those of integers: from `low`, zero if there is one number only, to before `high`."""
    numbers = [*limits, *(kwargs[name] for name in ("low", "high") if name in kwargs)]
    low, high = numbers if len(numbers) > 1 else (0, *numbers)
    return int(low), int(high)


def _draws_elsewhere(given: Options) -> bool:
    """Whether numbers of a generator, or in a tensor of the user's, are asked for."""
    return given.get("generator") is not None or given.get("out") is not None


@rule("bernoulli")
def bernoulli(function: Function, args: Arguments, kwargs: Options) -> Any:
    """Ones with a probability, else zeros; of torch.bernoulli(x) the elements of `x` are probabilities."""
    given = arguments_of("input p", {"p": None}, args, kwargs)
    x, p = given["input"], given["p"]
    if not isinstance(x, TrialTensor) or _draws_elsewhere(given):
        return refuse_random(function, args, kwargs)
    chance = x.stacked if p is None else align_operand(p, x.dim(), x)
    if not x.is_cuda and p is None:  # torch says what is wrong, with another generator
        torch.bernoulli(chance.detach(), generator=torch.Generator())
    kind = torch.promote_types(x.dtype, torch.float32)
    ones = drawn(x, tuple(x.shape), lambda streams, shape: streams.uniform(shape, kind)) < chance
    outcome = ones.to(x.dtype)
    if x.stacked.requires_grad:  # as in torch, the gradient is zero, not none
        outcome = torch.where(torch.ones_like(ones), outcome, x.stacked)
    return TrialTensor(outcome, x.trials)


@rule("normal")
def normal(function: Function, args: Arguments, kwargs: Options) -> Any:
    """Normal numbers, each with its own mean or deviation."""
    given = arguments_of("mean std", {"mean": 0.0, "std": 1.0}, args, kwargs)
    mean, std = given["mean"], given["std"]
    if _draws_elsewhere(given):
        return refuse_random(function, args, kwargs)
    tensors = [value for value in (mean, std) if isinstance(value, Tensor)]
    shape = torch.broadcast_shapes(*(value.shape for value in tensors))
    ours = [value for value in tensors if isinstance(value, TrialTensor)]
    like = next((value for value in ours if value.shape == shape), ours[0])
    if not like.is_cuda and isinstance(std, float):
        torch.normal(0.0, std, (1,), generator=torch.Generator())  # torch says what is wrong
    numbers = drawn(like, tuple(shape), lambda streams, own: streams.normal(own, like.dtype))
    mean, std = (align_operand(value, len(shape), like) for value in (mean, std))
    return TrialTensor((numbers * std + mean).detach(), like.trials)


@rule("multinomial")
def multinomial(function: Function, args: Arguments, kwargs: Options) -> Any:
    """Indices with the probabilities of the last axis, by how long one waits for each."""
    given = arguments_of("input num_samples replacement", {"replacement": False}, args, kwargs)
    x, count = given["input"], given["num_samples"]
    if _draws_elsewhere(given):
        return refuse_random(function, args, kwargs)
    chances = x.stacked.detach().double()
    if not x.is_cuda:  # torch says what is wrong, with another generator
        rows = chances.flatten(0, -2)
        torch.multinomial(rows, count, given["replacement"], generator=torch.Generator())
    if given["replacement"]:
        shape = (*x.shape[:-1], count)
        sums = chances.cumsum(-1)
        numbers = drawn(x, shape, lambda streams, own: streams.uniform(own, torch.float64)) * sums[..., -1:]
        # Of what is never drawn the sum is that of its neighbour.
        found = torch.searchsorted(sums, numbers, right=True)
        return TrialTensor(found.minimum((chances > 0).cumsum(-1).argmax(-1, keepdim=True)), x.trials)
    waits = drawn(x, tuple(x.shape), _waits)
    return TrialTensor((waits / chances).topk(count, largest=False).indices, x.trials)


def _for_each(value: Any, dims: int, kind: torch.dtype) -> Any:
    """A number, or those of the trials before `dims` axes."""
    if not isinstance(value, PerTrial):
        return value
    return on_device(value.values, kind, torch.device("cpu")).view(-1, *(1,) * dims)


def draw_new(streams: Streams, function: Function, args: Arguments, kwargs: Options) -> Tensor:
    """The numbers of a call of one of `NEW`, of shape (trials, *size)."""
    kind = kwargs.get("dtype") or torch.get_default_dtype()
    if function is torch.normal:
        given = arguments_of("mean std size", {}, args, kwargs)
        size = tuple(given["size"])
        mean, std = (_for_each(given[name], len(size), kind) for name in ("mean", "std"))
        numbers = streams.normal(size, kind) * std + mean
    elif function is torch.randperm:
        count = args[0] if args else kwargs["n"]
        numbers = streams.bits((count,)).argsort(stable=True).to(kwargs.get("dtype") or torch.int64)
    elif function is torch.randint:
        *limits, size = args if "size" not in kwargs else (*args, kwargs["size"])
        numbers = streams.integers(tuple(size), *_limits(limits, kwargs))
        numbers = numbers.to(kwargs.get("dtype") or torch.int64)
    else:
        draw = streams.uniform if function is torch.rand else streams.normal
        numbers = draw(sizes(args or (kwargs["size"],)), kind)
    placed: Tensor = numbers.to(kwargs.get("device") or torch.get_default_device())
    return placed
