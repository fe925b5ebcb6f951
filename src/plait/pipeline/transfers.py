"""What passes between stages: activations with the target on the way forward, gradients on the way back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from plait.comm.channels import Channels
from plait.comm.links.packing import Message
from plait.pipeline.cutting.edges import StageEdge
from plait.pipeline.op_timings import Communicating, MessageTiming
from plait.pipeline.stage import InFlight, RandomPosition
from plait.planner.schedules.operations import Backward, BackwardInput, Forward
from plait.schema.plans.plan import Layout


@dataclass(frozen=True)
class Hop:
    """A route as one stage sees it: its number serves as channel, even for forward, odd for backward."""

    number: int
    route: StageEdge


class StageTransfers:
    """Sends and receives for the stages of this worker; what one of them gives to another is kept here.

    `unpacked` reads the random state that comes along with a microbatch; `timed` begins the timing of a
    message that is sent or received.
    """

    def __init__(
        self,
        rank: int,
        layout: Layout,
        channels: Channels,
        device: torch.device,
        unpacked: Callable[[Tensor], RandomPosition],
        timed: Callable[[Communicating, bool, int, int], MessageTiming],
    ) -> None:
        self._rank, self._layout, self._channels, self._device = rank, layout, channels, device
        self._unpacked, self._timed = unpacked, timed
        self._local: dict[tuple[int, int], Any] = {}

    def receive_forward(self, hop: Hop, op: Forward, flight: InFlight, carries: bool, is_timed: bool) -> None:
        """Receive the inputs of the stage of `op`; `carries` says whether a random state comes along."""
        route = hop.route
        peer = self._layout.worker(route.source, op.microbatch)
        if peer == self._rank:
            tensors, target, random_state = self._local.pop((hop.number, op.microbatch))
        else:
            message = self._receive(op, peer, route.source, hop.number, is_timed)
            received = self._arrived(message, flight)
            random_state = self._unpacked(received.pop()) if carries else None
            tensors, rest = received[: len(route.names)], received[len(route.names) :]
            target = unpack_tree(rest, message.content.note) if route.takes_target else None
        for name, tensor in zip(route.names, tensors):
            leaf = tensor.detach()
            flight.inputs[name] = leaf.requires_grad_() if name in route.grad_names else leaf
        if route.takes_target:
            flight.target = target
        # Of several stages before, the last: random numbers go on from there.
        if random_state is not None and route.source >= flight.random_from:
            flight.random_state, flight.random_from = random_state, route.source

    def _arrived(self, message: Message, flight: InFlight) -> list[Any]:
        """The tensors on this worker's device; the sender owns those already there until `release`."""
        tensors = message.content.tensors
        moved = [None if t is None else t.to(self._device) for t in tensors]
        if any(new is not None and new is old for new, old in zip(moved, tensors)):
            flight.messages.append(message)
        else:
            message.release()
        return moved

    def send_forward(self, hops: Sequence[Hop], op: Forward, flight: InFlight, is_timed: bool = True) -> None:
        """Send on what the stage of `op` has computed."""
        values = {**flight.inputs, **flight.outputs}
        for hop in hops:
            tensors = [values[name] for name in hop.route.names]
            peer = self._layout.worker(hop.route.target, op.microbatch)
            target = flight.target if hop.route.takes_target else None
            if peer == self._rank:
                self._local[hop.number, op.microbatch] = tensors, target, flight.random_after
                continue
            leaves, note = pack_tree(target) if hop.route.takes_target else ([], "")
            if flight.random_after is not None:
                leaves = [*leaves, flight.random_after.packed()]
            content = [*tensors, *leaves]
            self._send(op, peer, hop.route.target, hop.number, content, note, is_timed)

    def receive_backward(
        self, hops: Sequence[Hop], op: Backward | BackwardInput
    ) -> tuple[dict[str, Tensor], list[Message]]:
        """The gradients of the stage's outputs, summed over the stages that used them."""
        grads: dict[str, Tensor] = {}
        messages: list[Message] = []
        for hop in hops:
            if not hop.route.grad_names:
                continue
            peer = self._layout.worker(hop.route.target, op.microbatch)
            if peer == self._rank:
                found = self._local.pop((hop.number + 1, op.microbatch))
            else:
                message = self._receive(op, peer, hop.route.target, hop.number + 1)
                messages.append(message)
                found = [t if t is None else t.to(self._device) for t in message.content.tensors]
            for name, grad in zip(hop.route.grad_names, found):
                if grad is not None:
                    grads[name] = grads[name] + grad if name in grads else grad
        return grads, messages

    def send_backward(self, hops: Sequence[Hop], op: Backward | BackwardInput, flight: InFlight) -> None:
        """Send the gradients of the stage's inputs back."""
        for hop in hops:
            if not hop.route.grad_names:
                continue
            grads = [flight.inputs[name].grad for name in hop.route.grad_names]
            peer = self._layout.worker(hop.route.source, op.microbatch)
            if peer == self._rank:
                self._local[hop.number + 1, op.microbatch] = grads
            else:
                self._send(op, peer, hop.route.source, hop.number + 1, grads)

    def _send(
        self,
        op: Communicating,
        peer: int,
        peer_stage: int,
        channel: int,
        tensors: Sequence[Tensor | None],
        note: str = "",
        is_timed: bool = True,
    ) -> None:
        """Send what an operation has computed; the tensors may be changed after the call."""
        timing = self._timed(op, True, peer, peer_stage) if is_timed else None
        what = f"{_message_of(op)} from stage {op.stage}"
        ended = None if timing is None else timing.finish
        size = self._channels.send(peer, channel, op.microbatch, tensors, what, note, ended)
        if timing is not None:
            timing.size = size

    def _receive(
        self, op: Communicating, peer: int, peer_stage: int, channel: int, is_timed: bool = True
    ) -> Message:
        """Wait for an input of an operation."""
        timing = self._timed(op, False, peer, peer_stage) if is_timed else None
        what = f"{_message_of(op)} into stage {op.stage}"
        message = self._channels.receive(peer, channel, op.microbatch, what)
        if timing is not None:
            timing.size = message.content.size
            timing.finish()
        return message


def _message_of(op: Communicating) -> str:
    """What an operation sends or receives, for errors."""
    return f"the {'forward' if isinstance(op, Forward) else 'backward'} of microbatch {op.microbatch}"


def pack_tree(target: Any) -> tuple[list[Tensor | None], str]:
    """The tensors of a batch, and a note of the rest: its form, and text and numbers, where it holds any."""
    leaves, spec = pytree.tree_flatten(target)
    plain = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    tensors = [leaf if isinstance(leaf, Tensor) else None for leaf in leaves]
    return tensors, json.dumps(
        [pytree.treespec_dumps(spec), plain if any(p is not None for p in plain) else []]
    )


def unpack_tree(tensors: list[Tensor | None], note: str) -> Any:
    spec, plain = json.loads(note)
    leaves = [p if t is None else t for t, p in zip(tensors, plain)] if plain else tensors
    return pytree.tree_unflatten(leaves, pytree.treespec_loads(spec))
