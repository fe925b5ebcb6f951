"""Attention within short sequences: all scores of a head are in registers at once.

Flash attention is made for long sequences; for those of a few dozen tokens it takes several passes over
memory. Queries, keys and values have shape (batch, heads, length, channels), 16 bits, any strides but that of
channels.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from plait.fusion.kernels import HALF, power_of_2_from
from plait.fusion.kernels.launch import launch, tl, triton
from plait.fusion.plain_function import PlainFunction, gradients_again

MOST_LENGTH = 128
WIDTHS = (16, 32, 64, 128)


@triton.jit
def _at(batch_stride, head_stride, row_stride, heads, length, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Where this program's rows of a tensor are, and which of them exist."""
    batch, head = (tl.program_id(0) // heads).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    offs = tl.arange(0, BLOCK).to(tl.int64)
    first = batch * batch_stride + head * head_stride
    return first + offs[:, None] * row_stride + tl.arange(0, WIDTH)[None, :], (offs < length)[:, None]


@triton.jit
def _rows(
    ptr, batch_stride, head_stride, row_stride, heads, length, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    at, real = _at(batch_stride, head_stride, row_stride, heads, length, BLOCK, WIDTH)
    return tl.load(ptr + at, mask=real, other=0.0)


@triton.jit
def _scores(q, k, scale, keys, CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    offs_q, offs_k = tl.arange(0, BLOCK_Q)[:, None], tl.arange(0, BLOCK_K)[None, :]
    sees = offs_k < keys
    if CAUSAL:
        sees = sees & (offs_k <= offs_q)
    else:
        sees = sees & (offs_q >= 0)
    return tl.where(sees, tl.dot(q, tl.trans(k)) * scale, float("-inf"))


@triton.jit
def _attention_forward(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, scale, heads, queries, keys,
    q0, q1, q2, k0, k1, k2, v0, v1, v2, o0, o1, o2,
    CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    q = _rows(q_ptr, q0, q1, q2, heads, queries, BLOCK_Q, WIDTH)
    k = _rows(k_ptr, k0, k1, k2, heads, keys, BLOCK_K, WIDTH)
    v = _rows(v_ptr, v0, v1, v2, heads, keys, BLOCK_K, WIDTH)
    scores = _scores(q, k, scale, keys, CAUSAL, BLOCK_Q, BLOCK_K)
    top = tl.max(scores, 1)
    chance = tl.exp(scores - top[:, None])
    total = tl.sum(chance, 1)
    o = tl.dot(chance.to(v.dtype), v) / total[:, None]
    at_o, in_o = _at(o0, o1, o2, heads, queries, BLOCK_Q, WIDTH)
    tl.store(o_ptr + at_o, o.to(v.dtype), mask=in_o)
    offs = tl.arange(0, BLOCK_Q)
    tl.store(lse_ptr + tl.program_id(0) * queries + offs, top + tl.log(total), mask=offs < queries)


@triton.jit
def _attention_backward(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, dq_ptr, dk_ptr, dv_ptr, scale, heads, queries, keys,
    q0, q1, q2, k0, k1, k2, v0, v1, v2, o0, o1, o2, dq0, dq1, dq2, dk0, dk1, dk2, dv0, dv1, dv2,
    CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    q = _rows(q_ptr, q0, q1, q2, heads, queries, BLOCK_Q, WIDTH)
    k = _rows(k_ptr, k0, k1, k2, heads, keys, BLOCK_K, WIDTH)
    v = _rows(v_ptr, v0, v1, v2, heads, keys, BLOCK_K, WIDTH)
    do = _rows(do_ptr, o0, o1, o2, heads, queries, BLOCK_Q, WIDTH)
    offs = tl.arange(0, BLOCK_Q)
    lse = tl.load(lse_ptr + tl.program_id(0) * queries + offs, mask=offs < queries, other=float("inf"))
    chance = tl.exp(_scores(q, k, scale, keys, CAUSAL, BLOCK_Q, BLOCK_K) - lse[:, None])
    of_chance = tl.dot(do, tl.trans(v))
    mean = tl.sum(of_chance * chance, 1)
    of_scores = (chance * (of_chance - mean[:, None]) * scale).to(q.dtype)
    dv = tl.dot(tl.trans(chance.to(q.dtype)), do)
    at_dq, in_q = _at(dq0, dq1, dq2, heads, queries, BLOCK_Q, WIDTH)
    at_dk, in_k = _at(dk0, dk1, dk2, heads, keys, BLOCK_K, WIDTH)
    at_dv, in_v = _at(dv0, dv1, dv2, heads, keys, BLOCK_K, WIDTH)
    tl.store(dv_ptr + at_dv, dv.to(q.dtype), mask=in_v)
    tl.store(dq_ptr + at_dq, tl.dot(of_scores, k).to(q.dtype), mask=in_q)
    tl.store(dk_ptr + at_dk, tl.dot(tl.trans(of_scores), q).to(q.dtype), mask=in_k)


def _blocks(queries: int, keys: int, width: int) -> dict[str, int]:
    sizes = [max(16, power_of_2_from(length)) for length in (queries, keys)]
    return {
        "BLOCK_Q": sizes[0],
        "BLOCK_K": sizes[1],
        "WIDTH": width,
        "num_warps": 8 if max(sizes) > 64 else 4,
    }


class _Attention(PlainFunction):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
        batch, heads, queries, width = q.shape
        # The heads of a token lie side by side, as the next layer reads them.
        strides = (queries * heads * width, width, heads * width, 1)
        o = torch.empty_strided(q.shape, strides, dtype=q.dtype, device=q.device)
        lse = torch.empty(batch, heads, queries, device=q.device, dtype=torch.float32)
        ctx.sizes = scale, heads, queries, k.shape[2]
        ctx.blocks = {"CAUSAL": causal, **_blocks(queries, k.shape[2], width)}
        numbers = *ctx.sizes, *(stride for tensor in (q, k, v, o) for stride in tensor.stride()[:3])
        launch(_attention_forward, (batch * heads,), (q, k, v, o, lse), numbers, **ctx.blocks)
        ctx.save_for_backward(q, k, v, lse)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        q, k, v, lse = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient that is differentiated again
            return *_by_torch(ctx, q, k, v, do), None, None
        do = do if do.stride(3) == 1 else do.contiguous()
        dq, dk, dv = _like(q, k, v)
        strides = [stride for tensor in (q, k, v, do, dq, dk, dv) for stride in tensor.stride()[:3]]
        tensors = q, k, v, do, lse, dq, dk, dv
        grid = (q.shape[0] * q.shape[1],)
        launch(_attention_backward, grid, tensors, (*ctx.sizes, *strides), **ctx.blocks)
        return dq, dk, dv, None, None


def _by_torch(ctx: Any, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Any:
    with sdpa_kernel(SDPBackend.MATH):
        o = F.scaled_dot_product_attention(q, k, v, is_causal=ctx.blocks["CAUSAL"], scale=ctx.sizes[0])
    return gradients_again(o, (q, k, v), ctx.needs_input_grad, do)


def _like(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Empty tensors like these; where they are parts of one, parts of one again, in the same order."""
    parts = (q, k, v)
    first = min(part.storage_offset() for part in parts)
    ends = [part.storage_offset() + _extent(part) for part in parts]
    together = sum(part.numel() for part in parts)
    joined = len({(part.untyped_storage().data_ptr(), part.stride(), part.shape) for part in parts}) == 1
    distinct = len({part.storage_offset() for part in parts}) == len(parts)
    if not joined or not distinct or max(ends) - first != together or _overlaps(q):
        return [torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in parts]
    whole = q.new_empty(together)
    return [whole.as_strided(part.shape, part.stride(), part.storage_offset() - first) for part in parts]


def _overlaps(part: Tensor) -> bool:
    """Whether some of its elements may lie in the same place."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(part.stride(), part.shape) if size > 1):
        if stride < expected:
            return True
        expected = stride * (size - 1) + expected
    return False


def _extent(part: Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride()))


def supports(q: Tensor, k: Tensor, v: Tensor) -> bool:
    half = q.dtype in HALF and q.dtype == k.dtype == v.dtype
    short = 0 < max(q.shape[2], k.shape[2]) <= MOST_LENGTH and k.shape[2] > 0 and q.numel() > 0
    alike = k.shape == v.shape and q.shape[:2] == k.shape[:2] and q.shape[3] == k.shape[3]
    rows = all(part.stride(3) == 1 for part in (q, k, v))
    return half and short and alike and rows and q.shape[3] in WIDTHS


def short_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool) -> Tensor:
    """Scaled dot product attention, as torch's function of these."""
    factor = 1.0 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    o: Tensor = _Attention.apply(q, k, v, factor, causal)
    return o
