"""Collectives on plain values and named tensors, sent as JSON and raw bytes; nothing is unpickled.

All ranks of the group (by default the world) call each of them together. They are for occasional use, not for
every step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Named = dict[str, Tensor]
# The dtype and shape of each named tensor.
Specs = Mapping[str, tuple[str, Sequence[int]]]
# The size of the first message of a broadcast value.
_HEAD_BYTES = 1024
# Consecutive tensors are sent together up to this many bytes.
_BATCH_BYTES = 1 << 20


def all_gather_values(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all ranks, in the order of ranks; anything that JSON can represent."""
    content = _bytes(value)
    size = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([content.numel()]), group=group)
    longest = int(max(length.item() for length in lengths))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: content.numel()] = content
    contents = [torch.zeros(longest, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(contents, padded, group=group)
    return [_value(each[: int(length.item())]) for each, length in zip(contents, lengths)]


def broadcast_value(value: Any, source: int, group: dist.ProcessGroup | None = None) -> Any:
    """The value of rank `source` (of the world); the values of other ranks are ignored.

    A small value is sent in one message, with its length.
    """
    head = torch.zeros(_HEAD_BYTES, dtype=torch.uint8)
    length, start = head[:8].view(torch.int64), head[8:]
    content = torch.zeros(0, dtype=torch.uint8)
    if dist.get_rank() == source:
        content = _bytes(value)
        length.fill_(content.numel())
        start[: content.numel()] = content[: start.numel()]
    dist.broadcast(head, source, group=group)
    count = int(length.item())
    if count <= start.numel():
        return _value(start[:count])
    if dist.get_rank() != source:
        content = torch.zeros(count, dtype=torch.uint8)
    dist.broadcast(content, source, group=group)
    return _value(content)


def broadcast_named(
    tensors: Mapping[str, Tensor] | None, source: int, group: dist.ProcessGroup | None = None
) -> Named:
    """The named tensors of rank `source`, on the CPU."""
    specs, named = broadcast_value(_specs(tensors or {}), source, group), Named()
    for names in _batches(specs):
        batch = _empty(specs, names) if dist.get_rank() != source else _packed(tensors or {}, names)
        if batch.numel():
            dist.broadcast(batch, source, group=group)
        named |= _unpacked(batch, specs, names)
    return named


def gather_named(tensors: Mapping[str, Tensor], target: int, group: dist.ProcessGroup | None = None) -> Named:
    """On rank `target` (of the world) the named tensors of all ranks, on the CPU; empty on other ranks.

    If several ranks have a tensor of the same name, that of the highest rank is returned.
    """
    _, named = gather_in_turn(tensors, target, group)
    return {name: tensor.cpu() for name, tensor in named}


def gather_in_turn(
    tensors: Mapping[str, Tensor], target: int, group: dist.ProcessGroup | None = None
) -> tuple[Specs, Iterator[tuple[str, Tensor]]]:
    """On rank `target` the dtypes and shapes of all ranks' named tensors, and an iterator over the tensors.

    The caller must exhaust the iterator. On other ranks it returns nothing, after sending. Each name belongs
    to one rank.
    """
    specs = all_gather_values(_specs(tensors), group)
    if dist.get_rank() != target:
        _send_batches(tensors, target, group)
        return {}, iter(())
    members = dist.get_process_group_ranks(group)
    return {name: spec for theirs in specs for name, spec in theirs.items()}, _received(
        tensors, members, specs, group
    )


def exchange_named(outgoing: Mapping[int, Mapping[str, Tensor]], pairs: Sequence[tuple[int, int]]) -> Named:
    """The named tensors that others send to this rank, on the CPU; `outgoing` are this rank's, by receiver.

    All ranks of the world call it with the same `pairs` of sender and receiver, which are processed in order.
    """
    rank, received = dist.get_rank(), Named()
    for source, target in pairs:
        if rank == source:
            _send(outgoing[target], target)
        elif rank == target:
            received |= _receive(source)
    return received


def _send(tensors: Mapping[str, Tensor], target: int) -> None:
    head = _bytes(_specs(tensors))
    dist.send(torch.tensor([head.numel()]), target)
    dist.send(head, target)
    _send_batches(tensors, target)


def _receive(source: int) -> Named:
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, source)
    head = torch.zeros(int(length.item()), dtype=torch.uint8)
    dist.recv(head, source)
    return Named(_receive_batches(_value(head), source))


def _received(
    tensors: Mapping[str, Tensor], members: list[int], specs: list[Any], group: dist.ProcessGroup | None
) -> Iterator[tuple[str, Tensor]]:
    for member, theirs in zip(members, specs):
        if member == dist.get_rank():
            yield from ((name, tensors[name].detach()) for name in theirs)
        else:
            yield from _receive_batches(theirs, member, group)


def _send_batches(tensors: Mapping[str, Tensor], target: int, group: dist.ProcessGroup | None = None) -> None:
    for names in _batches(_specs(tensors)):
        if (batch := _packed(tensors, names)).numel():
            dist.send(batch, target, group=group)


def _receive_batches(
    specs: Specs, source: int, group: dist.ProcessGroup | None = None
) -> Iterator[tuple[str, Tensor]]:
    for names in _batches(specs):
        if (batch := _empty(specs, names)).numel():
            dist.recv(batch, source, group=group)
        yield from _unpacked(batch, specs, names).items()


def _batches(specs: Specs) -> Iterator[list[str]]:
    """The names in order, in batches whose tensors are sent together."""
    names: list[str] = []
    size = 0
    for name, spec in specs.items():
        if names and size + _size(*spec) > _BATCH_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += _size(*spec)
    if names:
        yield names


def _packed(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    flat = [_flat(tensors[name]) for name in names]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _unpacked(batch: Tensor, specs: Specs, names: Sequence[str]) -> Named:
    if len(names) == 1:
        return {names[0]: _shaped(batch, *specs[names[0]])}
    parts = batch.split([_size(*specs[name]) for name in names])
    # Copied, for the alignment of its dtype.
    return {name: _shaped(part.clone(), *specs[name]) for name, part in zip(names, parts)}


def _bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _value(content: Tensor) -> Any:
    return json.loads(content.numpy().tobytes())


def _specs(tensors: Mapping[str, Tensor]) -> Specs:
    return {name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()}


def _flat(tensor: Tensor) -> Tensor:
    """The tensor's bytes as a flat tensor on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _empty(specs: Specs, names: Sequence[str]) -> Tensor:
    return torch.zeros(sum(_size(*specs[name]) for name in names), dtype=torch.uint8)


def _size(dtype: str, shape: Sequence[int]) -> int:
    return torch.Size(shape).numel() * _dtype(dtype).itemsize


def _shaped(flat: Tensor, dtype: str, shape: Sequence[int]) -> Tensor:
    return flat.view(_dtype(dtype)).reshape(shape)
