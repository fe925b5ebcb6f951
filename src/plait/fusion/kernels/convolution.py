"""Convolutions of all trials in one launch, as matrix products whose rows are gathered on the way in.

Images lie with their channels innermost, the trials' channels side by side: (batch, height, width, trials,
channels). A grouped convolution's kernels treat many groups poorly; here each trial is a batch of the
product.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,import-not-found"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl
except ImportError:
    from plait.fusion.kernels import absent as triton

_PRODUCT_BLOCKS = [(128, 64, 64, 4, 3), (128, 128, 64, 8, 3), (64, 64, 64, 4, 3), (128, 128, 32, 4, 4)]
_WEIGHT_BLOCKS = [(64, 64, 64, 4, 3), (128, 64, 64, 4, 3), (128, 128, 64, 8, 3), (64, 64, 128, 4, 3)]


def _configs(blocks: list[tuple[int, int, int, int, int]], names: tuple[str, str, str]) -> list[Any]:
    return [
        triton.Config(dict(zip(names, sizes[:3])), num_warps=sizes[3], num_stages=sizes[4])
        for sizes in blocks
    ]


@triton.autotune(
    _configs(_PRODUCT_BLOCKS, ("BLOCK_M", "BLOCK_N", "BLOCK_K")),
    key=["rows", "reduced", "outs", "KERNEL_W", "STRIDE", "TRANSPOSED"],
    warmup=3,
    rep=12,
)
@triton.jit
def _gather_product(
    a_ptr, b_ptr, bias_ptr, y_ptr, rows, reduced, outs, in_h, in_w, out_h, out_w,
    a_row, a_trial, b_trial, b_reduced, b_out, b_tap, y_row, y_trial,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, TRANSPOSED: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y[row, out] = sum over taps and channels of a[gathered row, channel] * b[channel, out]."""
    trial = tl.program_id(1).to(tl.int64)
    tiles_n = tl.cdiv(outs, BLOCK_N)
    offs_m = (tl.program_id(0) // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    image = offs_m // (out_h * out_w)
    y_at = (offs_m // out_w) % out_h
    x_at = offs_m % out_w
    blocks = tl.cdiv(reduced, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(KERNEL_H * KERNEL_W * blocks):
        tap = step // blocks
        offs_k = (step % blocks) * BLOCK_K + tl.arange(0, BLOCK_K)
        if TRANSPOSED:
            up, left = y_at + PAD_H - tap // KERNEL_W, x_at + PAD_W - tap % KERNEL_W
            in_y, in_x = up // STRIDE, left // STRIDE
            inside = (up >= 0) & (left >= 0) & (up % STRIDE == 0) & (left % STRIDE == 0)
            inside = inside & (in_y < in_h) & (in_x < in_w)
        else:
            in_y, in_x = y_at * STRIDE - PAD_H + tap // KERNEL_W, x_at * STRIDE - PAD_W + tap % KERNEL_W
            inside = (in_y >= 0) & (in_x >= 0) & (in_y < in_h) & (in_x < in_w)
        inside = inside & (offs_m < rows)
        a_at = ((image * in_h + in_y) * in_w + in_x).to(tl.int64) * a_row + trial * a_trial
        a = tl.load(
            a_ptr + a_at[:, None] + offs_k[None, :],
            mask=inside[:, None] & (offs_k < reduced)[None, :],
            other=0.0,
        )
        b_at = trial * b_trial + tap * b_tap + offs_k[:, None] * b_reduced + offs_n[None, :] * b_out
        b = tl.load(b_ptr + b_at, mask=(offs_k < reduced)[:, None] & (offs_n < outs)[None, :], other=0.0)
        acc = tl.dot(a, b, acc)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + trial * outs + offs_n, mask=offs_n < outs, other=0.0).to(tl.float32)[
            None, :
        ]
    y_to = offs_m.to(tl.int64)[:, None] * y_row + trial * y_trial + offs_n[None, :]
    tl.store(
        y_ptr + y_to, acc.to(y_ptr.dtype.element_ty), mask=(offs_m < rows)[:, None] & (offs_n < outs)[None, :]
    )


@triton.autotune(
    _configs(_WEIGHT_BLOCKS, ("BLOCK_O", "BLOCK_C", "BLOCK_M")),
    key=["rows", "outs", "channels", "KERNEL_W", "STRIDE"],
    warmup=3,
    rep=12,
)
@triton.jit
def _weight_gradient(
    x_ptr, dy_ptr, dw_ptr, rows, channels, outs, in_h, in_w, out_h, out_w,
    x_row, x_trial, dy_row, dy_trial, dw_trial,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """dw[out, tap, channel] = sum over rows of dy[row, out] * x[gathered row, channel]."""
    trial = tl.program_id(1).to(tl.int64)
    tiles_c = tl.cdiv(channels, BLOCK_C)
    tap = tl.program_id(0) % (KERNEL_H * KERNEL_W)
    tile = tl.program_id(0) // (KERNEL_H * KERNEL_W)
    offs_o = (tile // tiles_c) * BLOCK_O + tl.arange(0, BLOCK_O)
    offs_c = (tile % tiles_c) * BLOCK_C + tl.arange(0, BLOCK_C)
    acc = tl.zeros((BLOCK_O, BLOCK_C), dtype=tl.float32)
    for start in range(0, rows, BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)
        image = offs_m // (out_h * out_w)
        in_y = ((offs_m // out_w) % out_h) * STRIDE - PAD_H + tap // KERNEL_W
        in_x = (offs_m % out_w) * STRIDE - PAD_W + tap % KERNEL_W
        inside = (in_y >= 0) & (in_x >= 0) & (in_y < in_h) & (in_x < in_w) & (offs_m < rows)
        x_at = ((image * in_h + in_y) * in_w + in_x).to(tl.int64) * x_row + trial * x_trial
        x = tl.load(
            x_ptr + x_at[:, None] + offs_c[None, :],
            mask=inside[:, None] & (offs_c < channels)[None, :],
            other=0.0,
        )
        dy_at = offs_m.to(tl.int64)[:, None] * dy_row + trial * dy_trial + offs_o[None, :]
        dy = tl.load(dy_ptr + dy_at, mask=(offs_m < rows)[:, None] & (offs_o < outs)[None, :], other=0.0)
        acc = tl.dot(tl.trans(dy), x, acc)
    taps = KERNEL_H * KERNEL_W
    to = trial * dw_trial + (offs_o[:, None] * taps + tap) * channels + offs_c[None, :]
    tl.store(dw_ptr + to, acc, mask=(offs_o < outs)[:, None] & (offs_c < channels)[None, :])


class _TrialConvolution(torch.autograd.Function):
    """x (batch, trials x channels, height, width), channels innermost; weight (trials, out, channels...)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, pad: tuple[int, int]
    ) -> Tensor:
        count, outs, channels, kernel_h, kernel_w = weight.shape
        batch, _, in_h, in_w = x.shape
        out_h, out_w = (
            (in_h + 2 * pad[0] - kernel_h) // stride + 1,
            (in_w + 2 * pad[1] - kernel_w) // stride + 1,
        )
        taps = weight.to(x.dtype).permute(0, 1, 3, 4, 2).contiguous()
        y = torch.empty(
            (batch, count * outs, out_h, out_w),
            dtype=x.dtype,
            device=x.device,
            memory_format=torch.channels_last,
        )
        rows = batch * out_h * out_w
        _gather_product[_grid(rows, outs, count)](
            x, taps, bias if bias is not None else x, y, rows, channels, outs, in_h, in_w, out_h, out_w,
            count * channels, channels, taps.stride(0), 1, taps.stride(1), channels, count * outs, outs,
            kernel_h, kernel_w, stride, pad[0], pad[1], False, bias is not None,
        )  # fmt: skip
        ctx.save_for_backward(x, taps)
        ctx.geometry = (stride, pad, bias is not None, weight.dtype)
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator,unused-ignore]
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, taps = ctx.saved_tensors
        stride, pad, has_bias, kind = ctx.geometry
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx = _input_gradient(dy, taps, x, stride, pad) if ctx.needs_input_grad[0] else None
        dw = _gradient_of_weight(dy, taps, x, stride, pad, kind) if ctx.needs_input_grad[1] else None
        count, outs = taps.shape[:2]
        db = dy.sum((0, 2, 3), dtype=torch.float32).view(count, outs) if has_bias else None
        return dx, dw, db, None, None


def _grid(rows: int, outs: int, count: int) -> Any:
    return lambda meta: (triton.cdiv(rows, meta["BLOCK_M"]) * triton.cdiv(outs, meta["BLOCK_N"]), count)


def _input_gradient(dy: Tensor, taps: Tensor, x: Tensor, stride: int, pad: tuple[int, int]) -> Tensor:
    count, outs, kernel_h, kernel_w, channels = taps.shape
    batch, _, in_h, in_w = x.shape
    out_h, out_w = dy.shape[2:]
    dx = torch.empty_like(x)
    rows = batch * in_h * in_w
    _gather_product[_grid(rows, channels, count)](
        dy, taps, dy, dx, rows, outs, channels, out_h, out_w, in_h, in_w,
        count * outs, outs, taps.stride(0), taps.stride(1), 1, channels, count * channels, channels,
        kernel_h, kernel_w, stride, pad[0], pad[1], True, False,
    )  # fmt: skip
    return dx


def _gradient_of_weight(
    dy: Tensor, taps: Tensor, x: Tensor, stride: int, pad: tuple[int, int], kind: torch.dtype
) -> Tensor:
    count, outs, kernel_h, kernel_w, channels = taps.shape
    batch, _, in_h, in_w = x.shape
    out_h, out_w = dy.shape[2:]
    dw = torch.empty(taps.shape, dtype=kind, device=x.device)

    def grid(meta: Any) -> tuple[int, int]:
        tiles = triton.cdiv(outs, meta["BLOCK_O"]) * triton.cdiv(channels, meta["BLOCK_C"])
        return tiles * kernel_h * kernel_w, count

    _weight_gradient[grid](
        x, dy, dw, batch * out_h * out_w, channels, outs, in_h, in_w, out_h, out_w,
        count * channels, channels, count * outs, outs, dw.stride(0),
        kernel_h, kernel_w, stride, pad[0], pad[1],
    )  # fmt: skip
    return dw.permute(0, 1, 4, 2, 3)


def trial_convolution(
    folded: Tensor, weight: Tensor, bias: Tensor | None, stride: int, pad: tuple[int, int]
) -> Tensor:
    """The convolution of each trial's channels with its own weight; all in 16 bits, sums in float32.

    `folded` is (batch, trials x channels, height, width); under autocast it is cast as a convolution's input.
    """
    if torch.is_autocast_enabled("cuda"):
        folded = folded.to(torch.get_autocast_dtype("cuda"))
    if folded.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError(f"found {folded.dtype}, expected 16 bits")
    x = folded.contiguous(memory_format=torch.channels_last)
    outcome: Tensor = _TrialConvolution.apply(x, weight, bias, stride, pad)
    return outcome


__all__ = ["trial_convolution"]
