"""Collectives on plain values and named tensors: JSON and raw bytes travel, and nothing is ever unpickled.

Each is called by all ranks of its group together (the world, unless given). They are for what happens now and
then, not for every step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Named = dict[str, Tensor]
# The type and the shape of each named tensor.
Specs = Mapping[str, tuple[str, Sequence[int]]]
# The first message of a value that is broadcast.
_HEAD_BYTES = 1024
# Tensors that follow each other are sent together up to this many bytes.
_PARCEL = 1 << 20


def all_gather_values(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each rank gave, in the order of ranks; anything that JSON can hold."""
    own = _bytes(value)
    size = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([own.numel()]), group=group)
    longest = int(max(length.item() for length in lengths))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: own.numel()] = own
    found = [torch.zeros(longest, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(found, padded, group=group)
    return [_value(each[: int(length.item())]) for each, length in zip(found, lengths)]


def broadcast_value(value: Any, source: int, group: dist.ProcessGroup | None = None) -> Any:
    """What rank `source` (of the world) gave; the others' values do not matter.

    A small value takes one message, with its length.
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
    """The named tensors that rank `source` gave, on the CPU."""
    specs, found = broadcast_value(_specs(tensors or {}), source, group), Named()
    for names in _parcels(specs):
        parcel = _empty(specs, names) if dist.get_rank() != source else _packed(tensors or {}, names)
        if parcel.numel():
            dist.broadcast(parcel, source, group=group)
        found |= _unpacked(parcel, specs, names)
    return found


def gather_named(tensors: Mapping[str, Tensor], target: int, group: dist.ProcessGroup | None = None) -> Named:
    """On rank `target` (of the world) the named tensors of all ranks, on the CPU; elsewhere nothing.

    Of tensors that several ranks give under one name, the highest rank's stays.
    """
    _, found = gather_in_turn(tensors, target, group)
    return {name: tensor.cpu() for name, tensor in found}


def gather_in_turn(
    tensors: Mapping[str, Tensor], target: int, group: dist.ProcessGroup | None = None
) -> tuple[Specs, Iterator[tuple[str, Tensor]]]:
    """On rank `target` the types and shapes of all ranks' named tensors, and the tensors one after the other.

    The caller must take all of them. Elsewhere nothing, once all are sent. Names are given by one rank each.
    """
    specs = all_gather_values(_specs(tensors), group)
    if dist.get_rank() != target:
        _send_parcels(tensors, target, group)
        return {}, iter(())
    members = dist.get_process_group_ranks(group)
    return {name: spec for theirs in specs for name, spec in theirs.items()}, _received(
        tensors, members, specs, group
    )


def exchange_named(outgoing: Mapping[int, Mapping[str, Tensor]], pairs: Sequence[tuple[int, int]]) -> Named:
    """The named tensors that others send here, on the CPU; `outgoing` are this rank's, by whom they go to.

    All ranks of the world call it with the same `pairs` of a sender and a receiver, which go in this order.
    """
    rank, found = dist.get_rank(), Named()
    for source, target in pairs:
        if rank == source:
            _send(outgoing[target], target)
        elif rank == target:
            found |= _receive(source)
    return found


def _send(tensors: Mapping[str, Tensor], target: int) -> None:
    head = _bytes(_specs(tensors))
    dist.send(torch.tensor([head.numel()]), target)
    dist.send(head, target)
    _send_parcels(tensors, target)


def _receive(source: int) -> Named:
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, source)
    head = torch.zeros(int(length.item()), dtype=torch.uint8)
    dist.recv(head, source)
    return Named(_receive_parcels(_value(head), source))


def _received(
    tensors: Mapping[str, Tensor], members: list[int], specs: list[Any], group: dist.ProcessGroup | None
) -> Iterator[tuple[str, Tensor]]:
    for member, theirs in zip(members, specs):
        if member == dist.get_rank():
            yield from ((name, tensors[name].detach()) for name in theirs)
        else:
            yield from _receive_parcels(theirs, member, group)


def _send_parcels(tensors: Mapping[str, Tensor], target: int, group: dist.ProcessGroup | None = None) -> None:
    for names in _parcels(_specs(tensors)):
        if (parcel := _packed(tensors, names)).numel():
            dist.send(parcel, target, group=group)


def _receive_parcels(
    specs: Specs, source: int, group: dist.ProcessGroup | None = None
) -> Iterator[tuple[str, Tensor]]:
    for names in _parcels(specs):
        if (parcel := _empty(specs, names)).numel():
            dist.recv(parcel, source, group=group)
        yield from _unpacked(parcel, specs, names).items()


def _parcels(specs: Specs) -> Iterator[list[str]]:
    """Names in their order, so many in a row that their tensors are sent together."""
    names: list[str] = []
    size = 0
    for name, spec in specs.items():
        if names and size + _size(*spec) > _PARCEL:
            yield names
            names, size = [], 0
        names.append(name)
        size += _size(*spec)
    if names:
        yield names


def _packed(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    flat = [_flat(tensors[name]) for name in names]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _unpacked(parcel: Tensor, specs: Specs, names: Sequence[str]) -> Named:
    if len(names) == 1:
        return {names[0]: _shaped(parcel, *specs[names[0]])}
    parts = parcel.split([_size(*specs[name]) for name in names])
    # Each in memory of its own, where its first byte may lie.
    return {name: _shaped(part.clone(), *specs[name]) for name, part in zip(names, parts)}


def _bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _value(content: Tensor) -> Any:
    return json.loads(content.numpy().tobytes())


def _specs(tensors: Mapping[str, Tensor]) -> Specs:
    return {name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()}


def _flat(tensor: Tensor) -> Tensor:
    """The tensor's bytes, in a row on the CPU."""
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
