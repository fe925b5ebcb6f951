"""LSTM, GRU and plain recurrent layers: one batched product per time step for all trials."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.fusion.dispatch.fallback import loop
from plait.fusion.dispatch.per_trial import PerTrial
from plait.fusion.dispatch.registry import Arguments, Function, Options, rule, takes_per_trial
from plait.fusion.dispatch.tensor import Trials, TrialTensor, trials_of, unwrap, wrap
from plait.fusion.errors import FusionError, user_line
from plait.fusion.kernels import can_run_on
from plait.fusion.plain_function import PlainFunction, gradients_again
from plait.fusion.rules.dense import batched_linear
from plait.fusion.rules.dropout import drop

State = tuple[Tensor, ...]


class TimeStep(NamedTuple):
    """A time step of one kind of layer.

    `forward` takes the products of the input and of the hidden state, and the state; it returns the next
    state, output first, and what `backward` needs. That takes the gradient of the next state, what was kept,
    and the hidden state before and after; it returns the gradients of both products and of the state before,
    without what passes through the product (None: nothing else).
    """

    forward: Callable[[Tensor, Tensor, State], tuple[State, list[Tensor]]]
    backward: Callable[[State, Sequence[Tensor], Tensor, Tensor], tuple[Any, ...]]


def _lstm(from_input: Tensor, product: Tensor, state: State) -> tuple[State, list[Tensor]]:
    before = state[1]
    gates = from_input + product
    # That of the new values is not used, which takes less than to leave it out.
    opened = gates.sigmoid()
    enter, forget, _, leave = opened.chunk(4, -1)
    new = gates.chunk(4, -1)[2].tanh()
    cell = forget * before + enter * new
    shown = cell.tanh()
    return (leave * shown, cell), [opened, new, before, shown]


def _lstm_back(of_next: State, saved: Sequence[Tensor], before: Tensor, after: Tensor) -> tuple[Any, ...]:
    opened, new, cell, shown = saved
    enter, forget, _, leave = opened.chunk(4, -1)
    of_hidden, of_cell = of_next
    of_cell = of_cell + _tanh_back(of_hidden * leave, shown)
    of_new = _tanh_back(of_cell * enter, new)
    of_opened = torch.cat([of_cell * new, of_cell * cell, of_new, of_hidden * shown], -1)
    of_gates = _sigmoid_back(of_opened, opened)
    of_gates.chunk(4, -1)[2].copy_(of_new)
    return of_gates, of_gates, None, of_cell * forget


# The gradient of the input from that of the result, and the result.
_sigmoid_back = torch.ops.aten.sigmoid_backward.default
_tanh_back = torch.ops.aten.tanh_backward.default


def _gru(from_input: Tensor, product: Tensor, state: State) -> tuple[State, list[Tensor]]:
    (hidden,) = state
    size = 2 * hidden.shape[-1]
    own = product[..., size:]
    opened = (from_input[..., :size] + product[..., :size]).sigmoid()
    reset, update = opened.chunk(2, -1)
    new = (from_input[..., size:] + reset * own).tanh()
    # Not lerp, as on a CPU under autocast the products are in 16 bits and the first state is not.
    return (new + update * (hidden - new),), [opened, new, own]


def _gru_back(of_next: State, saved: Sequence[Tensor], before: Tensor, after: Tensor) -> tuple[Any, ...]:
    opened, new, own = saved
    reset, update = opened.chunk(2, -1)
    (of_hidden,) = of_next
    of_kept = of_hidden * update
    of_new = _tanh_back(of_hidden - of_kept, new)
    of_opened = _sigmoid_back(torch.cat([of_new * own, of_hidden * (before - new)], -1), opened)
    of_input = torch.cat([of_opened, of_new], -1)
    return of_input, torch.cat([of_opened, of_new * reset], -1), of_kept


def _plain(activation: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor]) -> TimeStep:
    """A layer without gates; `slope` is that of the activation, from its result."""

    def forward(from_input: Tensor, product: Tensor, state: State) -> tuple[State, list[Tensor]]:
        return (activation(from_input + product),), []

    def backward(of_next: State, saved: Sequence[Tensor], before: Tensor, after: Tensor) -> tuple[Any, ...]:
        of_sum = of_next[0] * slope(after)
        return of_sum, of_sum, None

    return TimeStep(forward, backward)


def _rows(tensor: Tensor) -> Tensor:
    """(trials, batch, channels) as (trials x batch, channels), for torch's kernels of cells."""
    return tensor.reshape(-1, tensor.shape[-1])


def _lstm_on_gpu(from_input: Tensor, product: Tensor, state: State) -> tuple[State, list[Tensor]]:
    before = state[1]
    made = torch.ops.aten._thnn_fused_lstm_cell.default(_rows(from_input), _rows(product), _rows(before))
    hidden, cell = (part.view_as(before) for part in made[:2])
    return (hidden, cell), [before, cell, made[2]]


def _lstm_back_on_gpu(
    of_next: State, saved: Sequence[Tensor], before: Tensor, after: Tensor
) -> tuple[Any, ...]:
    *cells, work = saved
    made = torch.ops.aten._thnn_fused_lstm_cell_backward_impl.default(
        *map(_rows, of_next), *map(_rows, cells), work, False
    )
    of_gates = made[0].view(*after.shape[:2], -1)
    return of_gates, of_gates, None, made[1].view_as(after)


def _gru_on_gpu(from_input: Tensor, product: Tensor, state: State) -> tuple[State, list[Tensor]]:
    (hidden,) = state
    made = torch.ops.aten._thnn_fused_gru_cell.default(_rows(from_input), _rows(product), _rows(hidden))
    return (made[0].view_as(hidden),), [made[1]]


def _gru_back_on_gpu(
    of_next: State, saved: Sequence[Tensor], before: Tensor, after: Tensor
) -> tuple[Any, ...]:
    made = torch.ops.aten._thnn_fused_gru_cell_backward.default(_rows(of_next[0]), saved[0], False)
    of_input, of_product, of_kept = (part.view(*after.shape[:2], -1) for part in made[:3])
    return of_input, of_product, of_kept


_STEPS: dict[str, TimeStep] = {
    "lstm": TimeStep(_lstm, _lstm_back),
    "gru": TimeStep(_gru, _gru_back),
    "rnn_tanh": _plain(torch.tanh, lambda y: 1.0 - y * y),
    "rnn_relu": _plain(torch.relu, lambda y: (y > 0).to(y.dtype)),
}
# By torch's kernels of cells, whose gradients cannot be differentiated again.
_STEPS_ON_GPU = {
    **_STEPS,
    "lstm": TimeStep(_lstm_on_gpu, _lstm_back_on_gpu),
    "gru": TimeStep(_gru_on_gpu, _gru_back_on_gpu),
}


def _step_on(device: torch.device, kind: str) -> TimeStep:
    return (_STEPS_ON_GPU if device.type == "cuda" else _STEPS)[kind]


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
            out, end = _run(function.__name__, inner, first, layer_weights, backwards=direction == 1)
            outputs.append(out)
            ends.append(end)
        inner = torch.cat(outputs, -1) if both_ways else outputs[0]
    last = [torch.stack(parts, 1) for parts in zip(*ends)]
    return wrap((inner if batch_first else inner.transpose(1, 2), *last), trials)


def weight_of(weight: Tensor) -> Tensor:
    """A weight with the trials axis, or the one that all trials share."""
    return weight.stacked if isinstance(weight, TrialTensor) else weight


def _run(
    kind: str, x_tbsc: Tensor, state: State, weights: list[Tensor], backwards: bool
) -> tuple[Tensor, State]:
    """One layer in one direction over a batch of sequences (trials, batch, time, channels)."""
    input_weight, state_weight = weights[:2]
    input_bias, state_bias = weights[2:] if len(weights) == 4 else (None, None)
    from_input = batched_linear(x_tbsc, input_weight, input_bias)
    if state_weight.dim() == 2 or any(part.dtype != from_input.dtype for part in state):
        return _take_steps(kind, from_input, state_weight, state_bias, state, backwards)
    if state_bias is not None and state_bias.dim() == 1:  # frozen, and the same for all trials
        state_bias = state_bias.expand(len(from_input), -1)
    # Under autocast cast once, not at each time step.
    own = [None if part is None else part.to(from_input.dtype) for part in (state_weight, state_bias)]
    outcome = _Sequence.apply(kind, backwards, from_input, *own, *state)
    return outcome[0], outcome[1:]


def _take_steps(
    kind: str, from_input: Tensor, weight: Tensor, bias: Tensor | None, state: State, backwards: bool
) -> tuple[Tensor, State]:
    """All outputs and the last state, in operations that autograd keeps."""
    outputs = []
    for own in _in_order(from_input, backwards):
        state, _ = _STEPS[kind].forward(own, batched_linear(state[0], weight, bias), state)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs, 2), state


def _in_order(x_tbsc: Tensor, backwards: bool) -> Sequence[Tensor]:
    """The time steps in the order in which a direction takes them."""
    steps = x_tbsc.unbind(2)
    return steps[::-1] if backwards else steps


class _Sequence(PlainFunction):
    """`_take_steps` of tensors of one type.

    Autograd would keep a node and its tensors for each operation of each step.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kind: str,
        backwards: bool,
        from_input_tbsg: Tensor,
        weight_tgh: Tensor,
        bias_tg: Tensor | None,
        *state: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.kind, ctx.backwards, ctx.states = kind, backwards, len(state)
        ctx.at_once = _at_once(from_input_tbsg, weight_tgh)
        if ctx.at_once:
            from plait.fusion.kernels import recurrent as kernels  # needs Triton

            walked = kernels.walk(kind, from_input_tbsg, weight_tgh, bias_tg, state, backwards)
            outputs_tbsh, *others = walked
            ctx.save_for_backward(from_input_tbsg, weight_tgh, bias_tg, *state, *others)
            return outputs_tbsh, *walked.last(backwards)
        step, weight = _step_on(weight_tgh.device, kind).forward, weight_tgh.mT.contiguous()
        offset = None if bias_tg is None else bias_tg.unsqueeze(1)
        begin, outputs, kept = state, list[Tensor](), list[Tensor]()
        for from_input in _in_order(from_input_tbsg, backwards):
            hidden = state[0]
            product = torch.bmm(hidden, weight) if offset is None else torch.baddbmm(offset, hidden, weight)
            state, saved = step(from_input, product, state)
            outputs.append(state[0])
            kept += saved
        # A model may write to what is returned, so that it is not kept itself.
        ctx.save_for_backward(from_input_tbsg, weight_tgh, bias_tg, *begin, *outputs, *kept)
        ctx.steps = len(outputs)
        return torch.stack(outputs[::-1] if backwards else outputs, 2), *(part.clone() for part in state)

    @staticmethod
    def backward(ctx: Any, of_outputs: Tensor, *of_last: Tensor) -> tuple[Any, ...]:
        from_input, weight, bias, *others = ctx.saved_tensors
        states = ctx.states
        if torch.is_grad_enabled():  # a gradient that is differentiated again
            begin = tuple(others[:states])
            outputs, last = _take_steps(ctx.kind, from_input, weight, bias, begin, ctx.backwards)
            inputs = [from_input, weight, bias, *begin]
            asked = [part is not None and part.requires_grad for part in inputs]
            return None, None, *gradients_again((outputs, *last), inputs, asked, (of_outputs, *of_last))
        if ctx.at_once:
            from plait.fusion.kernels import recurrent as kernels  # needs Triton

            of_input, of_product, of_first = kernels.walk_back(
                ctx.kind, of_outputs, of_last, weight, others[states:], ctx.backwards
            )
            # Batch and time are rows.
            of_product, before = of_product.flatten(1, 2), others[states].flatten(1, 2)
            return None, None, of_input, *_of_weights(of_product, before, bias), *of_first
        steps = ctx.steps
        step, kept = _step_on(weight.device, ctx.kind).backward, others[states + steps :]
        hidden = [others[0], *others[states : states + steps]]
        size = len(kept) // steps
        of_state: State = of_last
        of_inputs: list[Tensor] = []
        of_products: list[Tensor] = []
        for number, own in reversed([*enumerate(_in_order(of_outputs, ctx.backwards))]):
            of_state = (of_state[0] + own, *of_state[1:])
            saved = kept[number * size : (number + 1) * size]
            of_input, of_product, passed, *rest = step(of_state, saved, hidden[number], hidden[number + 1])
            through = torch.bmm(of_product, weight) if passed is None else passed.baddbmm(of_product, weight)
            of_state = (through, *rest)
            of_inputs.append(of_input)
            of_products.append(of_product)
        before, of_product = torch.cat(hidden[-2::-1], 1), torch.cat(of_products, 1)
        of_input = torch.stack(of_inputs if ctx.backwards else of_inputs[::-1], 2)
        return None, None, of_input, *_of_weights(of_product, before, bias), *of_state


def _of_weights(of_product: Tensor, before: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The gradients of the state's weight and bias from those of its products with all states, as rows."""
    return torch.bmm(of_product.mT, before), None if bias is None else of_product.sum(1)


def _at_once(from_input: Tensor, weight: Tensor) -> bool:
    if not can_run_on(from_input):
        return False
    from plait.fusion.kernels import recurrent as kernels  # needs Triton

    return kernels.supports(from_input, weight)


def _as_products(state: Tensor) -> Tensor:
    """The initial state in the autocast dtype of products on a GPU, as in torch's layers."""
    if not (state.is_cuda and torch.is_autocast_enabled("cuda")):
        return state
    return state.to(torch.get_autocast_dtype("cuda"))


def _drops(chance: float) -> bool:
    return isinstance(chance, PerTrial) or chance > 0


def dropout_between(args: Arguments) -> Arguments:
    """The dropout between recurrent layers, and whether it is one of training, also of a packed sequence."""
    return args[6:8] if isinstance(args[3], (list, tuple)) else args[5:7]


def _packed(function: Function, args: Arguments) -> Any:
    dropout, training = dropout_between(args)
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
    before = tuple(_as_products(unwrap(part, trials)) for part in states)
    from_input = batched_linear(unwrap(x, trials), input_weight, input_bias)
    product = batched_linear(before[0], state_weight, state_bias)
    end, _ = _STEPS[function.__name__.removesuffix("_cell")].forward(from_input, product, before)
    return wrap(end if function.__name__ == "lstm_cell" else end[0], trials)
