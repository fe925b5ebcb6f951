"""LSTM, GRU and plain recurrent layers: one batched product per time step for all trials."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plait.fusion.dispatch.fallback import loop
from plait.fusion.dispatch.registry import Arguments, Function, Options, rule, takes_per_trial
from plait.fusion.dispatch.tensor import Trials, TrialTensor, trials_of, unwrap, wrap
from plait.fusion.errors import FusionError, user_line
from plait.fusion.rules.dense import batched_linear
from plait.fusion.rules.dropout import drop
from plait.fusion.trials.per_trial import PerTrial

State = tuple[Tensor, ...]
# (input projection, state, weight_hh, bias_hh) -> the next state, output first
Step = Callable[[Tensor, State, Tensor, Tensor | None], State]


def _lstm_step(from_input: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    hidden, cell = state
    gates = from_input + batched_linear(hidden, weight, bias)
    enter, forget, new, leave = gates.unflatten(-1, (4, -1)).unbind(-2)
    cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * cell.tanh(), cell


def _gru_step(from_input: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    (hidden,) = state
    reset, update, new = from_input.unflatten(-1, (3, -1)).unbind(-2)
    hidden_reset, hidden_update, hidden_new = (
        batched_linear(hidden, weight, bias).unflatten(-1, (3, -1)).unbind(-2)
    )
    candidate = (new + (reset + hidden_reset).sigmoid() * hidden_new).tanh()
    # Not lerp, as under autocast the products are in 16 bits and the first state is not.
    return (candidate + (update + hidden_update).sigmoid() * (hidden - candidate),)


def _tanh_step(from_input: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    return ((from_input + batched_linear(state[0], weight, bias)).tanh(),)


def _relu_step(from_input: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    return ((from_input + batched_linear(state[0], weight, bias)).relu(),)


_STEPS: dict[str, Step] = {
    "lstm": _lstm_step,
    "gru": _gru_step,
    "rnn_tanh": _tanh_step,
    "rnn_relu": _relu_step,
}


@takes_per_trial
@rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def layers(function: Function, args: Arguments, kwargs: Options) -> Any:
    """All layers over all time steps; packed sequences and projections run trial by trial."""
    if isinstance(args[3], (list, tuple)):
        return _packed(function, args)
    x, state, weights, has_bias, count, dropout, training, both_ways, batch_first = args
    trials = trials_of(x, state, weights)
    states = state if isinstance(state, (tuple, list)) else (state,)
    directions = 2 if both_ways else 1
    per_layer = len(weights) // (count * directions)
    if per_layer != (4 if has_bias else 2):
        return _packed(function, args)
    inner = unwrap(x, trials)
    inner = inner if batch_first else inner.transpose(1, 2)
    flat_weights = [weight_of(weight) for weight in weights]
    begin = [_as_products(unwrap(part, trials)).unbind(1) for part in states]
    ends: list[State] = []
    for layer in range(count):
        if layer and training and _drops(dropout):
            inner = drop(inner, dropout, trials)
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            layer_weights = flat_weights[number * per_layer : (number + 1) * per_layer]
            first = tuple(part[number] for part in begin)
            out, end = _run(_STEPS[function.__name__], inner, first, layer_weights, backwards=direction == 1)
            outputs.append(out)
            ends.append(end)
        inner = torch.cat(outputs, -1) if both_ways else outputs[0]
    last = [torch.stack(parts, 1) for parts in zip(*ends)]
    return wrap((inner if batch_first else inner.transpose(1, 2), *last), trials)


def weight_of(weight: Tensor) -> Tensor:
    """A weight with the trials axis, or the one that all trials share."""
    return weight.stacked if isinstance(weight, TrialTensor) else weight


def _run(
    step: Step, x_tbsc: Tensor, state: State, weights: list[Tensor], backwards: bool
) -> tuple[Tensor, State]:
    """One layer in one direction over a batch of sequences (trials, batch, time, channels)."""
    input_weight, state_weight = weights[:2]
    input_bias, state_bias = weights[2:] if len(weights) == 4 else (None, None)
    steps = list(batched_linear(x_tbsc, input_weight, input_bias).unbind(2))
    outputs = []
    for from_input in reversed(steps) if backwards else steps:
        state = step(from_input, state, state_weight, state_bias)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs, 2), state


def _as_products(state: Tensor) -> Tensor:
    """The initial state in the autocast dtype of products on a GPU, as in torch's layers."""
    if not (state.is_cuda and torch.is_autocast_enabled("cuda")):
        return state
    return state.to(torch.get_autocast_dtype("cuda"))


def _drops(chance: float) -> bool:
    return isinstance(chance, PerTrial) or chance > 0


def _packed(function: Function, args: Arguments) -> Any:
    dropout, training = args[-4], args[-3]
    if isinstance(args[3], (list, tuple)):
        dropout, training = args[6], args[7]
    if training and _drops(dropout):
        raise FusionError(
            f"{user_line()}\n  drops out between the layers of a packed sequence, or of one with "
            f"projections, which run trial by trial; put an nn.Dropout between single layers"
        )
    return loop(function, args, {})


@rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def cell(function: Function, args: Arguments, kwargs: Options) -> Any:
    """LSTMCell, GRUCell and RNNCell: one time step."""
    x, state, *weights = args
    trials: Trials = trials_of(args)
    if x.dim() != 2 or len(weights) != 4:
        return loop(function, args, kwargs)
    states = state if isinstance(state, (tuple, list)) else (state,)
    input_weight, state_weight, input_bias, state_bias = (
        None if weight is None else weight_of(weight) for weight in weights
    )
    assert input_weight is not None
    assert state_weight is not None
    from_input = batched_linear(unwrap(x, trials), input_weight, input_bias)
    step = _STEPS[function.__name__.removesuffix("_cell")]
    end = step(
        from_input, tuple(_as_products(unwrap(part, trials)) for part in states), state_weight, state_bias
    )
    return wrap(end if function.__name__ == "lstm_cell" else end[0], trials)
