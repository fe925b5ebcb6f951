"""Recurrent layers of all trials: one launch for all time steps, and one for their gradients.

A program takes some sequences of one trial through time. It reads what its last step made from memory, as a
state of all channels does not fit in registers. In 16 bits, summed up in float32.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.fusion.kernels import HALF, cdiv, power_of_2_from
from plait.fusion.kernels.launch import launch, tl, triton

# A program reads all weights at each step: of wide layers torch's products of all trials are faster.
_WIDEST = 256
_WARPS = 8
# Channels that are summed up at once, and the most that are computed at once.
_SUMMED, _MOST_CHANNELS = 64, 256
_FEWEST_ROWS, _MOST_ROWS = 16, 64
# Of its shared memory a program holds this much for other things than operands.
_OTHER_BYTES = 16 << 10
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
# What is kept of a step and a channel for its gradient.
_KEPT = {"lstm": 4, "gru": 4, "rnn_tanh": 1, "rnn_relu": 1}


class Walked(NamedTuple):
    """What all steps made, (trials, batch, time, channels), and what their gradients need."""

    outputs: Tensor
    # The hidden state before each step.
    before: Tensor
    kept: Tensor
    # The cell before the first step and after each, in the order in which steps were taken.
    cells: Tensor | None

    def last(self, backwards: bool) -> tuple[Tensor, ...]:
        """The state after the last step."""
        output = self.outputs[:, :, 0 if backwards else -1].clone()
        return (output,) if self.cells is None else (output, self.cells[:, :, -1].clone())


@triton.jit
def _tanh(x):
    # By the series where the difference from one would have few digits.
    square = x * x
    near = x * (1.0 - square * (0.33333333 - square * (0.13333333 - square * 0.053968254)))
    return tl.where(tl.abs(x) < 0.1, near, 2.0 * tl.sigmoid(2.0 * x) - 1.0)


@triton.jit
def _add_product(total, h, weight_ptr, gate, col, k, hidden, in_n, in_k):
    """`total` and the product of h (rows, k) with some rows of the weight, one for each of col."""
    at = (gate * hidden + col).to(tl.int64)[None, :] * hidden + k[:, None]
    weight = tl.load(weight_ptr + at, mask=in_k[:, None] & in_n[None, :], other=0.0)
    return tl.dot(h, weight, total)


@triton.jit
def _gate(x_ptr, bias_ptr, gate, at, col, hidden, mask, in_n, HAS_BIAS: tl.constexpr):
    """The input's part of a gate, and the bias of the state's part."""
    x = tl.load(x_ptr + at[:, None] + (gate * hidden + col)[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + gate * hidden + col, mask=in_n, other=0.0).to(tl.float32)
    else:
        bias = tl.zeros_like(in_n.to(tl.float32))
    return x, bias[None, :]


@triton.jit
def _save(ptr, value, mask):
    tl.store(ptr, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["batch", "steps"])
def _steps(
    x_ptr, weight_ptr, bias_ptr, before_ptr, y_ptr, kept_ptr, cells_ptr, batch, steps, hidden,
    KIND: tl.constexpr, GATES: tl.constexpr, KEPT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BACKWARDS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    trial = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    real = rows < batch
    sequence = trial * batch + rows
    weight_ptr += trial * GATES * hidden * hidden
    bias_ptr += trial * GATES * hidden
    for number in range(steps):
        step = steps - 1 - number if BACKWARDS else number
        following = step - 1 if BACKWARDS else step + 1
        at = sequence * steps + step
        for start in range(0, hidden, BLOCK_N):
            col = start + tl.arange(0, BLOCK_N)
            in_n = col < hidden
            mask = real[:, None] & in_n[None, :]
            first = tl.zeros((BLOCK_B, BLOCK_N), dtype=tl.float32)
            second = tl.zeros((BLOCK_B, BLOCK_N), dtype=tl.float32)
            third = tl.zeros((BLOCK_B, BLOCK_N), dtype=tl.float32)
            fourth = tl.zeros((BLOCK_B, BLOCK_N), dtype=tl.float32)
            for k_start in range(0, hidden, BLOCK_K):
                k = k_start + tl.arange(0, BLOCK_K)
                in_k = k < hidden
                h = tl.load(
                    before_ptr + (at * hidden)[:, None] + k[None, :],
                    mask=real[:, None] & in_k[None, :],
                    other=0.0,
                )
                first = _add_product(first, h, weight_ptr, 0, col, k, hidden, in_n, in_k)
                if GATES > 1:
                    second = _add_product(second, h, weight_ptr, 1, col, k, hidden, in_n, in_k)
                    third = _add_product(third, h, weight_ptr, 2, col, k, hidden, in_n, in_k)
                if GATES > 3:
                    fourth = _add_product(fourth, h, weight_ptr, 3, col, k, hidden, in_n, in_k)
            from_x = at * GATES * hidden
            keep = kept_ptr + (at * KEPT * hidden)[:, None] + col[None, :]
            x, bias = _gate(x_ptr, bias_ptr, 0, from_x, col, hidden, mask, in_n, HAS_BIAS)
            first += x + bias
            if GATES == 1:
                y = tl.maximum(first, 0.0) if KIND == "rnn_relu" else _tanh(first)
                _save(keep, y, mask)
            else:
                first = tl.sigmoid(first)
                x, bias = _gate(x_ptr, bias_ptr, 1, from_x, col, hidden, mask, in_n, HAS_BIAS)
                second = tl.sigmoid(second + x + bias)
                x, bias = _gate(x_ptr, bias_ptr, 2, from_x, col, hidden, mask, in_n, HAS_BIAS)
                third += bias
                if KIND == "gru":
                    own = third
                    third = _tanh(x + first * own)
                    h_at = before_ptr + (at * hidden)[:, None] + col[None, :]
                    old = tl.load(h_at, mask=mask, other=0.0).to(tl.float32)
                    y = third + second * (old - third)
                    _save(keep + 3 * hidden, own, mask)
                else:
                    third = _tanh(third + x)
                    x, bias = _gate(x_ptr, bias_ptr, 3, from_x, col, hidden, mask, in_n, HAS_BIAS)
                    fourth = tl.sigmoid(fourth + x + bias)
                    cell_at = (sequence * (steps + 1) + number) * hidden
                    cell_at = cells_ptr + cell_at[:, None] + col[None, :]
                    cell = tl.load(cell_at, mask=mask, other=0.0).to(tl.float32)
                    cell = second * cell + first * third
                    _save(cell_at + hidden, cell, mask)
                    y = fourth * _tanh(cell)
                    _save(keep + 3 * hidden, fourth, mask)
                _save(keep, first, mask)
                _save(keep + hidden, second, mask)
                _save(keep + 2 * hidden, third, mask)
            _save(y_ptr + (at * hidden)[:, None] + col[None, :], y, mask)
            if number + 1 < steps:
                next_at = (sequence * steps + following) * hidden
                _save(before_ptr + next_at[:, None] + col[None, :], y, mask)
        # All channels are written before the next step reads them.
        tl.debug_barrier()


@triton.jit(do_not_specialize=["batch", "steps", "states"])
def _steps_back(
    dy_ptr, weight_ptr, before_ptr, kept_ptr, cells_ptr, of_x_ptr, of_product_ptr, of_hidden_ptr, of_cell_ptr,
    batch, steps, states, hidden, KIND: tl.constexpr, GATES: tl.constexpr, KEPT: tl.constexpr,
    BACKWARDS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`of_hidden` and `of_cell` are two each of as many `states`: one is read where the other is written."""
    trial = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    real = rows < batch
    sequence = trial * batch + rows
    weight_ptr += trial * GATES * hidden * hidden
    for back in range(steps):
        number = steps - 1 - back
        step = back if BACKWARDS else number
        at = sequence * steps + step
        to_x = (at * GATES * hidden)[:, None]
        for start in range(0, hidden, BLOCK_N):
            col = start + tl.arange(0, BLOCK_N)
            mask = real[:, None] & (col < hidden)[None, :]
            here = (at * hidden)[:, None] + col[None, :]
            state = (sequence * hidden)[:, None] + col[None, :]
            keep = kept_ptr + (at * KEPT * hidden)[:, None] + col[None, :]
            of_y = tl.load(dy_ptr + here, mask=mask, other=0.0).to(tl.float32)
            of_y += tl.load(of_hidden_ptr + state, mask=mask, other=0.0)
            of_x = of_x_ptr + to_x + col[None, :]
            first = tl.load(keep, mask=mask, other=0.0).to(tl.float32)
            if KIND == "rnn_tanh":
                _save(of_x, of_y * (1.0 - first * first), mask)
            elif KIND == "rnn_relu":
                _save(of_x, tl.where(first > 0.0, of_y, 0.0), mask)
            else:
                second = tl.load(keep + hidden, mask=mask, other=0.0).to(tl.float32)
                third = tl.load(keep + 2 * hidden, mask=mask, other=0.0).to(tl.float32)
                fourth = tl.load(keep + 3 * hidden, mask=mask, other=0.0).to(tl.float32)
                if KIND == "gru":
                    old = tl.load(before_ptr + here, mask=mask, other=0.0).to(tl.float32)
                    passed = of_y * second
                    of_new = (of_y - passed) * (1.0 - third * third)
                    of_reset = of_new * fourth * first * (1.0 - first)
                    of_update = of_y * (old - third) * second * (1.0 - second)
                    of_product = of_product_ptr + to_x + col[None, :]
                    _save(of_x, of_reset, mask)
                    _save(of_x + hidden, of_update, mask)
                    _save(of_x + 2 * hidden, of_new, mask)
                    _save(of_product, of_reset, mask)
                    _save(of_product + hidden, of_update, mask)
                    _save(of_product + 2 * hidden, of_new * first, mask)
                    _save(of_hidden_ptr + states + state, passed, mask)
                else:
                    cell_at = ((sequence * (steps + 1) + number) * hidden)[:, None] + col[None, :]
                    old = tl.load(cells_ptr + cell_at, mask=mask, other=0.0).to(tl.float32)
                    shown = _tanh(tl.load(cells_ptr + cell_at + hidden, mask=mask, other=0.0).to(tl.float32))
                    read = (back % 2) * states
                    of_cell = tl.load(of_cell_ptr + read + state, mask=mask, other=0.0)
                    of_cell += of_y * fourth * (1.0 - shown * shown)
                    _save(of_x, of_cell * third * first * (1.0 - first), mask)
                    _save(of_x + hidden, of_cell * old * second * (1.0 - second), mask)
                    _save(of_x + 2 * hidden, of_cell * first * (1.0 - third * third), mask)
                    _save(of_x + 3 * hidden, of_y * shown * fourth * (1.0 - fourth), mask)
                    _save(of_cell_ptr + states - read + state, of_cell * second, mask)
        tl.debug_barrier()
        for start in range(0, hidden, BLOCK_N):
            col = start + tl.arange(0, BLOCK_N)
            in_n = col < hidden
            mask = real[:, None] & in_n[None, :]
            state = (sequence * hidden)[:, None] + col[None, :]
            total = tl.zeros((BLOCK_B, BLOCK_N), dtype=tl.float32)
            if KIND == "gru":
                total += tl.load(of_hidden_ptr + states + state, mask=mask, other=0.0)
            for k_start in range(0, GATES * hidden, BLOCK_K):
                k = k_start + tl.arange(0, BLOCK_K)
                in_k = k < GATES * hidden
                of_gates = tl.load(
                    of_product_ptr + to_x + k[None, :], mask=real[:, None] & in_k[None, :], other=0.0
                )
                w_at = k.to(tl.int64)[:, None] * hidden + col[None, :]
                weight = tl.load(weight_ptr + w_at, mask=in_k[:, None] & in_n[None, :], other=0.0)
                total = tl.dot(of_gates, weight, total)
            tl.store(of_hidden_ptr + state, total, mask=mask)
        tl.debug_barrier()


def supports(x: Tensor, weight: Tensor) -> bool:
    """Whether all steps of `x` (trials, batch, time, channels) are taken in one launch."""
    return x.dtype in HALF and x.numel() > 0 and weight.shape[-1] <= _WIDEST


def _launch(kernel: Any, tensors: tuple[Any, ...], x: Tensor, numbers: tuple[Any, ...], hidden: int) -> None:
    trials, batch = x.shape[:2]
    processors, shared = _device(x.device)
    rows = _FEWEST_ROWS
    # Programs that read the same weights are made fewer where a GPU is full of them.
    while rows < _MOST_ROWS and trials * cdiv(batch, rows) > processors:
        rows *= 2
    channels, stages = _shape(x.shape[-1] // hidden, hidden, rows, shared)
    grid = cdiv(batch, rows), trials
    whole = (*numbers, rows, channels, _SUMMED)
    launch(kernel, grid, tensors, whole, num_warps=_WARPS, num_stages=stages)


@cache
def _device(device: torch.device) -> tuple[int, int]:
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, found.shared_memory_per_block_optin  # type: ignore[attr-defined]


def _shape(gates: int, hidden: int, rows: int, shared: int) -> tuple[int, int]:
    """How many channels are computed at once, and how many loads are made ahead: as many as memory holds."""
    channels = min(_MOST_CHANNELS, max(_FEWEST_ROWS, power_of_2_from(hidden)))
    while True:
        operands = (gates * channels + rows) * _SUMMED * 2
        stages = min(3, 1 + (shared - _OTHER_BYTES) // operands)
        if stages > 1 or channels == _FEWEST_ROWS:
            return channels, stages
        channels //= 2


def walk(
    kind: str, x: Tensor, weight: Tensor, bias: Tensor | None, state: tuple[Tensor, ...], backwards: bool
) -> Walked:
    """All steps of a layer from the products of its input, (trials, batch, time, gates x channels)."""
    trials, batch, steps, _ = x.shape
    hidden = weight.shape[-1]
    x, weight = x.contiguous(), weight.contiguous()
    outputs, before = (x.new_empty(trials, batch, steps, hidden) for _ in range(2))
    before[:, :, -1 if backwards else 0].copy_(state[0])
    kept = x.new_empty(trials, batch, steps, _KEPT[kind] * hidden)
    cells = None
    if kind == "lstm":
        cells = x.new_empty(trials, batch, steps + 1, hidden)
        cells[:, :, 0].copy_(state[1])
    tensors = x, weight, x if bias is None else bias.contiguous(), before, outputs, kept, cells
    numbers = batch, steps, hidden, kind, _GATES[kind], _KEPT[kind], bias is not None, backwards
    _launch(_steps, tensors, x, numbers, hidden)
    return Walked(outputs, before, kept, cells)


def walk_back(
    kind: str, of_outputs: Tensor, of_last: tuple[Tensor, ...], weight: Tensor, others: Sequence[Any],
    backwards: bool,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """The gradients of the products of the input and of the state, and of the first state.

    `others` are what `walk` made after the outputs.
    """
    dy, weight = of_outputs.contiguous(), weight.contiguous()
    before, kept, cells = others
    trials, batch, steps, hidden = before.shape
    of_input = dy.new_empty(trials, batch, steps, _GATES[kind] * hidden)
    of_product = torch.empty_like(of_input) if kind == "gru" else of_input
    of_states = [dy.new_empty((2, *part.shape), dtype=torch.float32) for part in of_last]
    for own, part in zip(of_states, of_last):
        own[0].copy_(part)
    of_cell = of_states[1] if kind == "lstm" else None
    tensors = dy, weight, before, kept, cells, of_input, of_product, of_states[0], of_cell
    numbers = batch, steps, of_last[0].numel(), hidden, kind, _GATES[kind], _KEPT[kind], backwards
    _launch(_steps_back, tensors, of_input, numbers, hidden)
    # That of the cell is written to either in turn.
    made = [own[steps % 2 if number else 0].to(dy.dtype) for number, own in enumerate(of_states)]
    return of_input, of_product, tuple(made)
