"""All-reduce of gradients in buckets, sent while backward still runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from plait.core.errors import PlaitError
from plait.schema.topology import Topology
from plait.sync.allreduce.sums import Members, Native, Pending, Reducer, Spec
from plait.sync.allreduce.tree import OverTopology

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
LAST_BUCKET_BYTES = 2 << 20
# The most numbers that may travel along with the gradients, by default.
MOST_NOTES = 16
# Elements of one dot product.
DOT_ELEMENTS = 1 << 20
# A mark says of a gradient that there is one (1), that a part of it came after it was sent, and that it is
# sparse; summed over ranks the three stay apart.
LATE, SPARSE = float(1 << 20), float(1 << 40)
# On a GPU, where a look makes the host wait, the marks of so many first steps are looked at.
LOOKS = 8


@dataclass
class Bucket:
    """Gradients that travel together: each parameter has a view of one flat buffer."""

    parameters: list[Parameter]
    flat: Tensor = field(default_factory=lambda: torch.empty(0))
    views: list[Tensor] = field(default_factory=list)
    waiting: int = 0
    # What backward has left for each parameter, until it is copied into the buffer.
    grads: list[Tensor | None] = field(default_factory=list)
    filled: list[bool] = field(default_factory=list)
    # What the gradients are multiplied by on their way into the buffer.
    factor: float = 1.0
    # The squared norm of what goes out, where it is asked for; there once the bucket is filled.
    measured: bool = False
    square: Tensor | None = None

    @property
    def spec(self) -> Spec:
        first = self.parameters[0]
        return Spec(sum(p.numel() for p in self.parameters), first.dtype, first.device)

    def forget(self) -> None:
        """Wait for the gradients of another step."""
        self.waiting = len(self.parameters)
        self.grads = [None] * len(self.parameters)
        self.filled = [False] * len(self.parameters)
        self.factor = 1.0

    def fill(self) -> None:
        """Copy the gradients into the buffer, zeros where there are none; another thread may do it."""
        grads = [grad for grad in self.grads if grad is not None]
        with torch.no_grad():
            for view, grad in zip(self.views, self.grads):
                if grad is None:
                    view.zero_()
            if grads:
                given = [view for view, grad in zip(self.views, self.grads) if grad is not None]
                torch._foreach_copy_(given, grads)
            if self.factor != 1.0:
                self.flat.mul_(self.factor)
            self.square = _squared(self.flat) if self.measured else None
        self.grads = []

    def look_at(self, flat: Tensor) -> None:
        """Use `flat` as the buffer from now on."""
        self.flat = flat
        pieces = flat.split([p.numel() for p in self.parameters])
        self.views = [piece.view_as(p) for piece, p in zip(pieces, self.parameters)]


class AllReduce:
    """Sums the gradients of all workers, each times a factor: the share that the worker has of the batch.

    Backward fills buckets from the last layer to the first, and each goes out as soon as it is full. All
    ranks send them in the same order, whatever order their backward had. Between `begin` and `agree` every
    rank runs the same number of backward passes or none; only the last one (`last=True`) sends. Sums go by
    the backend's own way, or over a topology, which needs to know the `members`. Up to `most_notes` numbers
    travel along. With `own_memory` each step's gradients are in memory of their own, for an optimizer that
    keeps them; else they are views of buffers that the next step fills again.

    A gradient may come in parts, as where a layer is shared by reentrant checkpoints. The first time, parts
    that came after theirs was sent are summed apart; then nothing is sent before backward has ended.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        group: dist.ProcessGroup | None = None,
        members: Members | None = None,
        most_notes: int = MOST_NOTES,
        may_fail: bool = False,
        own_memory: bool = False,
    ) -> None:
        self._own_memory = own_memory
        self._overlaps = True
        self._looks = 0
        # By bucket and place: parts that came late, and the rows of sparse gradients.
        self._late: dict[tuple[int, int], Tensor] = {}
        self._rows: dict[tuple[int, int], Tensor] = {}
        self._sparse: set[tuple[int, int]] = set()
        self._group = group
        self._members = members
        self._buckets = make_buckets(parameters)
        specs = [bucket.spec for bucket in self._buckets]
        marks = sum(len(bucket.parameters) for bucket in self._buckets)
        device = specs[0].device if specs else torch.device("cpu")
        self._most_notes = most_notes
        self._failure: BaseException | None = None
        self._check = self._raise_failure if may_fail else None
        self._specs = [*specs, Spec(most_notes + marks, torch.float64, device)]
        self._over: OverTopology | None = None
        self._buffers: Sequence[Tensor] = []
        self._look_at([torch.zeros(s.count, dtype=s.dtype, device=s.device) for s in self._specs])
        self._reducer: Reducer = Native(self._buffers, group, self._check)
        self._sending: list[Pending] = []
        self._next = 0
        self._armed = False
        # The places in autograd where each gradient is complete: also one that an operation added to itself.
        self._ends = [[get_gradient_edge(p).node for p in bucket.parameters] for bucket in self._buckets]
        self._hooks = [
            node.register_hook(self._hook(index, place))
            for index, nodes in enumerate(self._ends)
            for place, node in enumerate(nodes)
        ]
        self._watched: list[tuple[Node, RemovableHandle]] = []

    @property
    def gradient_bytes(self) -> int:
        """The bytes of one step's gradients."""
        return sum(bucket.spec.size_bytes for bucket in self._buckets)

    def switch(self, topology: Topology | None) -> None:
        """Sum over `topology` from the next step on, or the backend's own way (None).

        All workers call it between the same two steps; gradients of the step before are void.
        """
        if topology is not None and self._members is None:
            raise PlaitError("topology: this all-reduce was made without its members; give it members")
        if topology is not None and self._over is None:
            assert self._members is not None
            self._over = OverTopology(self._members, self._specs)
            self._look_at(self._over.buffers)
        if topology is None:
            self._reducer = Native(self._buffers, self._group, self._check)
        else:
            assert self._over is not None
            self._over.switch(topology)
            self._reducer = self._over

    def close(self) -> None:
        """End the thread and remove the hooks from the parameters; all call it after their last step."""
        for hook in self._hooks:
            hook.remove()
        if self._over is not None:
            self._over.close()

    def fail(self, failure: BaseException) -> None:
        """Make all waits for a sum fail; may be called from any thread. Needs `may_fail`."""
        self._failure = failure
        if self._over is not None:
            self._over.fail(failure)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def begin(self) -> None:
        """Forget the gradients of the step before."""
        for bucket in self._buckets:
            bucket.forget()
            for parameter in bucket.parameters:
                parameter.grad = None
        self._next = 0
        self._armed = False
        self._late.clear()
        self._rows.clear()
        self._watch({})

    def before_backward(
        self, last: bool, factor: float = 1.0, leaves: Mapping[Parameter, Parameter] | None = None
    ) -> None:
        """Whether the backward pass that follows completes the gradients of this step.

        If so, it sends them times `factor`, and finds them on `leaves`, by the parameters that those stand
        for, where it leaves them there instead.
        """
        self._armed = last and self._overlaps
        self._weigh(factor)
        self._watch(leaves or {})

    def measure_norms(self, measured: bool = True) -> None:
        """Take the squared norm of what this rank sends at each step, or no more, from the next one on."""
        for bucket in self._buckets:
            bucket.measured = measured

    def squared_norm_of_share(self, place: int, places: int) -> Tensor:
        """Of the summed gradients, that of this rank's share of the elements, after `agree`.

        The shares of all `places` together are the squared norm of the sum.
        """
        found = torch.zeros((), dtype=torch.float64, device=self._buffers[-1].device)
        for flat in self._buffers[:-1]:
            count = flat.numel()
            if own := count * (place + 1) // places - count * place // places:
                found += _squared(flat[count * place // places :][:own])
        return found

    def agree(self, notes: Tensor, factor: float = 1.0, weigh_norm: float | None = None) -> Tensor:
        """Every rank's gradients now hold the sum over all ranks; returns the sum of `notes` likewise.

        This rank's gradients come in times `factor`: that which backward sent them with, if it did. With
        `weigh_norm`, the last note is the squared norm of what this rank sent times that number.

        `notes` is a small vector on the gradients' device (loss, flags) that travels along as float64. A
        parameter that no rank used keeps no gradient, as in one process.
        """
        assert all(bucket.factor == factor for bucket in self._buckets[: self._next])
        self._weigh(factor)
        self._take_rest()
        marks = [self._mark(*place) for place in self._places()]
        carried = self._buffers[-1]
        carried.zero_()
        carried[: len(notes)] = notes.detach()
        carried[self._most_notes :] = torch.tensor(marks, dtype=torch.float64)

        def add_norm() -> None:
            # In the order of the sums, so all buckets are filled by now.
            squares = [bucket.square for bucket in self._buckets if bucket.square is not None]
            if squares and weigh_norm is not None:
                carried[len(notes) - 1] = torch.stack(squares).sum() * weigh_norm

        fill = add_norm if weigh_norm is not None else None
        self._sending.append(self._reducer.start(len(self._buckets), fill))
        for sum_ in self._sending:
            sum_.wait()
        self._sending.clear()
        self._looks += 1
        # What this rank filled was used; only for the rest must it look at what the others say.
        if self._looks <= LOOKS or carried.device.type == "cpu" or not all(marks):
            marks = carried[self._most_notes :].tolist()
            self._add_late(marks, factor)
        elif self._late or self._rows.keys() - self._sparse:
            raise PlaitError(
                "a gradient came in parts, or sparse, for the first time after many steps, which workers "
                "cannot agree on any more; give checkpoint() use_reentrant=False, and do the same in each "
                "forward"
            )
        self._hand_back([mark > 0 for mark in marks])
        return carried[: len(notes)].clone()

    def _places(self) -> Iterator[tuple[int, int]]:
        """All gradients, by bucket and place in it."""
        return ((i, j) for i, bucket in enumerate(self._buckets) for j in range(len(bucket.parameters)))

    def _mark(self, index: int, place: int) -> float:
        late = LATE if (index, place) in self._late else 0.0
        sparse = SPARSE if (index, place) in self._rows else 0.0
        return float(self._buckets[index].filled[place]) + late + sparse

    def _add_late(self, marks: Sequence[float], factor: float) -> None:
        """Sum the parts of gradients that came after theirs was sent; `marks` are those of all ranks."""
        self._sparse |= {place for place, mark in zip(self._places(), marks) if mark >= SPARSE}
        late = {place[0] for place, mark in zip(self._places(), marks) if mark % SPARSE >= LATE}
        for index in sorted(late):
            bucket = self._buckets[index]
            parts = torch.zeros_like(bucket.flat)
            pieces = parts.split([p.numel() for p in bucket.parameters])
            for place, piece in enumerate(pieces):
                if (index, place) in self._late:
                    piece.copy_(self._late[index, place].reshape(-1)).mul_(factor)
            dist.all_reduce(parts, group=self._group)
            bucket.flat.add_(parts)
        self._overlaps = self._overlaps and not late

    def _look_at(self, buffers: Sequence[Tensor]) -> None:
        self._buffers = buffers
        for bucket, flat in zip(self._buckets, buffers):
            bucket.look_at(flat)

    def _weigh(self, factor: float) -> None:
        for bucket in self._buckets:
            bucket.factor = factor

    def _watch(self, leaves: Mapping[Parameter, Parameter]) -> None:
        """Take gradients from `leaves`, too, and from those of the step before no more."""
        for _, hook in self._watched:
            hook.remove()
        self._watched = []
        for index, bucket in enumerate(self._buckets):
            for place, parameter in enumerate(bucket.parameters):
                if parameter in leaves:
                    leaf = leaves[parameter]
                    # The leaf does not keep it, and its graph may be made only in backward.
                    node = get_gradient_edge(leaf).node
                    self._watched.append((node, node.register_hook(self._hook(index, place, leaf))))

    def _hook(self, index: int, place: int, leaf: Parameter | None = None) -> Callable[..., None]:
        left = self._buckets[index].parameters[place] if leaf is None else leaf

        def take(*_: object) -> None:
            if self._armed and left.grad is not None:
                self._take(index, place, left)
                self._send_full()

        return take

    def _take(self, index: int, place: int, parameter: Tensor) -> None:
        bucket, grad = self._buckets[index], parameter.grad
        assert grad is not None
        parameter.grad = None
        if grad.is_sparse:
            rows = grad.coalesce().indices()[0]
            before = self._rows.get((index, place))
            self._rows[index, place] = rows if before is None else torch.cat([before, rows])
            grad = grad.to_dense()
        if not bucket.filled[place]:
            bucket.grads[place] = grad
            bucket.filled[place] = True
            bucket.waiting -= 1
        elif index < self._next:
            earlier = self._late.get((index, place))
            self._late[index, place] = grad if earlier is None else earlier + grad
        else:
            first = bucket.grads[place]
            assert first is not None
            bucket.grads[place] = first + grad

    def _send_full(self) -> None:
        while self._next < len(self._buckets) and self._buckets[self._next].waiting == 0:
            self._sending.append(self._reducer.start(self._next, self._buckets[self._next].fill))
            self._next += 1

    def _take_rest(self) -> None:
        """Fill what the last backward pass did not reach: gradients of earlier passes, or zeros."""
        for index, bucket in enumerate(self._buckets):
            for place, parameter in enumerate(bucket.parameters):
                if not bucket.filled[place] and parameter.grad is not None:
                    self._take(index, place, parameter)
                elif not bucket.filled[place]:
                    bucket.waiting -= 1
        self._send_full()

    def _hand_back(self, used: Sequence[bool]) -> None:
        for (index, place), is_used in zip(self._places(), used):
            bucket = self._buckets[index]
            parameter, view = bucket.parameters[place], bucket.views[place]
            if (index, place) in self._sparse:
                parameter.grad = self._as_sparse(index, place, view)
            elif is_used:
                parameter.grad = view.clone() if self._own_memory else view
            else:
                parameter.grad = None

    def _as_sparse(self, index: int, place: int, view: Tensor) -> Tensor:
        """The sum of sparse gradients, with the rows that any rank has; all ranks call it together."""
        touched = torch.zeros(len(view), device=view.device)
        if (index, place) in self._rows:
            touched[self._rows[index, place]] = 1
        dist.all_reduce(touched, dist.ReduceOp.MAX, group=self._group)
        rows = touched.nonzero()[:, 0]
        return torch.sparse_coo_tensor(
            rows[None], view[rows], view.shape, check_invariants=False, is_coalesced=True
        )


def _squared(flat: Tensor) -> Tensor:
    """By dot products, as fast as a norm; of pieces, since float32 sums of many millions lose digits."""
    wide = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
    return torch.stack([torch.dot(piece, piece) for piece in wide.split(DOT_ELEMENTS)]).double().sum()


def make_buckets(parameters: Sequence[Parameter]) -> list[Bucket]:
    """Parameters from last to first in buckets of one type and device.

    The first bucket is small, to start early, and so is the last: nothing is left to hide its journey.
    """
    order = [p for p in reversed(parameters) if p.requires_grad]
    sizes = [p.numel() * p.element_size() for p in order]
    buckets: list[Bucket] = []
    members: list[Parameter] = []
    size, limit, rest, before = 0, FIRST_BUCKET_BYTES, sum(sizes), 0
    for parameter, own in zip(order, sizes):
        other = bool(members) and (parameter.dtype, parameter.device) != (members[0].dtype, members[0].device)
        last = rest <= LAST_BUCKET_BYTES < rest + before
        if members and (other or size >= limit or last):
            buckets.append(Bucket(members))
            members, size, limit = [], 0, BUCKET_BYTES
        members.append(parameter)
        size += own
        rest, before = rest - own, own
    return [*buckets, Bucket(members)] if members else buckets
