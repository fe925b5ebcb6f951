"""All-reduce of gradients in buckets, sent while backward still runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _unflatten_dense_tensors
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from plait.comm.data_group import find_data_group
from plait.core.errors import PlaitError
from plait.schema.topology import Topology
from plait.sync.allreduce.reducers import Members, Native, Reducer, Spec, WaitForSum
from plait.sync.allreduce.topology_reduce import OverTopology

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
LAST_BUCKET_BYTES = 2 << 20
# The default limit of extra scalars that are summed with the gradients.
MAX_SCALARS = 16
# Elements of one dot product.
DOT_ELEMENTS = 1 << 20
# The mark of a gradient: 1 if it exists, plus LATE if a part of it came after it was sent, plus SPARSE if it
# is sparse. In the sum over ranks the three remain distinguishable.
LATE, SPARSE = float(1 << 20), float(1 << 40)
# On a GPU, where reading them synchronizes with the host, marks are read only in this many first steps.
LOOKS = 8


@dataclass
class Bucket:
    """Gradients that are reduced together: each parameter has a view of one flat buffer."""

    parameters: list[Parameter]
    flat: Tensor = field(default_factory=lambda: torch.empty(0))
    views: list[Tensor] = field(default_factory=list)
    waiting: int = 0
    # The gradient of each parameter, until it is copied into the buffer.
    grads: list[Tensor | None] = field(default_factory=list)
    filled: list[bool] = field(default_factory=list)
    # Gradients are multiplied by this when they are copied into the buffer.
    factor: float = 1.0
    # The squared norm of what this rank sends, if `measured`; set when the bucket is filled.
    measured: bool = False
    square: Tensor | None = None

    @property
    def spec(self) -> Spec:
        first = self.parameters[0]
        return Spec(sum(p.numel() for p in self.parameters), first.dtype, first.device)

    def forget(self) -> None:
        """Reset for the gradients of the next step."""
        self.waiting = len(self.parameters)
        self.grads = [None] * len(self.parameters)
        self.filled = [False] * len(self.parameters)
        self.factor = 1.0

    def fill(self) -> None:
        """Copy the gradients into the buffer, zeros for missing ones; may be called in another thread."""
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

    def use_buffer(self, flat: Tensor) -> None:
        """Use `flat` as the buffer from now on."""
        self.flat = flat
        self.views = self.views_of(flat)

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """A view of `flat` for each parameter."""
        return list(_unflatten_dense_tensors(flat, self.parameters))


class AllReduce:
    """Sums the gradients of `members`, each times a factor: the worker's share of the batch.

    Backward fills buckets from the last layer to the first, and each is sent as soon as it is full. All
    ranks send them in the same order, whatever the order of their backward. Between `begin` and
    `sum_gradients` every rank runs the same number of backward passes or none; only the last one
    (`last=True`) sends. Sums use the backend's all-reduce, or a topology. Up to `max_scalars` extra scalars
    are summed too. With `copy_gradients` each step's gradients are copies, for an optimizer that keeps them;
    otherwise they are views of buffers that the next step overwrites.

    A gradient may arrive in parts, for example if reentrant checkpoints share a layer. The first time, parts
    that arrive after the gradient was sent are summed separately; from then on nothing is sent before
    backward has ended.

    `on_gradient` is called in backward when the gradient of a parameter is complete, and no backward pass was
    announced that sends it.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        members: Members,
        max_scalars: int = MAX_SCALARS,
        may_fail: bool = False,
        copy_gradients: bool = False,
        on_gradient: Callable[[], None] | None = None,
    ) -> None:
        self._copy_gradients = copy_gradients
        self._on_gradient = on_gradient
        self._overlaps = True
        self._looks = 0
        # By bucket and position in it: late parts of gradients, and the rows of sparse gradients.
        self._late: dict[tuple[int, int], Tensor] = {}
        self._rows: dict[tuple[int, int], Tensor] = {}
        self._sparse: set[tuple[int, int]] = set()
        self._group = members.group
        self._members = members
        self._buckets = make_buckets(parameters)
        specs = [bucket.spec for bucket in self._buckets]
        marks = sum(len(bucket.parameters) for bucket in self._buckets)
        device = specs[0].device if specs else torch.device("cpu")
        self._max_scalars = max_scalars
        self._failure: BaseException | None = None
        self._check = self._raise_failure if may_fail else None
        self._specs = [*specs, Spec(max_scalars + marks, torch.float64, device)]
        self._over: OverTopology | None = None
        self._buffers: Sequence[Tensor] = []
        self._use_buffers([torch.zeros(s.count, dtype=s.dtype, device=s.device) for s in self._specs])
        # A model on several devices is summed over gloo.
        summed_on = device if {spec.device for spec in specs} == {device} else torch.device("cpu")
        self._data = find_data_group(members.rendezvous, members.ranks, summed_on)
        self._reducer: Reducer = Native(self._buffers, self._group, self._check, self._data)
        self._sending: list[WaitForSum] = []
        self._next = 0
        self._armed = False
        # The autograd nodes after which each gradient is complete, also if several operations add to it.
        self._ends = [[get_gradient_edge(p).node for p in bucket.parameters] for bucket in self._buckets]
        self._hooks = [
            node.register_hook(self._hook(index, position))
            for index, nodes in enumerate(self._ends)
            for position, node in enumerate(nodes)
        ]
        self._watched: list[tuple[Node, RemovableHandle]] = []

    @property
    def gradient_bytes(self) -> int:
        """The bytes of one step's gradients."""
        return sum(bucket.spec.size_bytes for bucket in self._buckets)

    def switch(self, topology: Topology | None) -> None:
        """Sum over `topology` from the next step on, or by the backend's all-reduce (None).

        All workers call it between the same two steps; gradients of the previous step become invalid.
        """
        if topology is not None and self._over is None:
            self._over = OverTopology(self._members, self._specs)
            self._use_buffers(self._over.buffers)
        if topology is None:
            self._reducer = Native(self._buffers, self._group, self._check, self._data)
        else:
            assert self._over is not None
            self._over.switch(topology)
            self._reducer = self._over

    def close(self) -> None:
        """End the thread and remove the hooks from the parameters; all call it after the last step."""
        for hook in self._hooks:
            hook.remove()
        # They have the shapes of the parameters, which may change now.
        self._ends, self._hooks = [], []
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

    def begin(self, keep_gradients: bool = False) -> None:
        """Start a step: drop the gradients of the previous one, or add to them (`keep_gradients`)."""
        for bucket in self._buckets:
            bucket.forget()
            for parameter in () if keep_gradients else bucket.parameters:
                parameter.grad = None
        self._next = 0
        self._armed = False
        self._late.clear()
        self._rows.clear()
        self._watch({})

    def before_backward(
        self, last: bool, factor: float = 1.0, leaves: Mapping[Parameter, Parameter] | None = None
    ) -> None:
        """Announce a backward pass; `last` says whether it completes the gradients of this step.

        If so, they are sent times `factor`. `leaves` maps parameters to tensors that receive their gradients
        instead.
        """
        self._armed = last and self._overlaps
        self._weigh(factor)
        self._watch(leaves or {})

    def measure_norms(self, measured: bool = True) -> None:
        """Compute the squared norm of what this rank sends at each step from now on, or stop doing so."""
        for bucket in self._buckets:
            bucket.measured = measured

    def squared_norm_of_share(self, rank: int, size: int) -> Tensor:
        """The squared norm of this rank's share of the summed gradients, after `sum_gradients`.

        The sum over all `size` ranks is the squared norm of the summed gradients.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._buffers[-1].device)
        for flat in self._buffers[:-1]:
            count = flat.numel()
            start, stop = count * rank // size, count * (rank + 1) // size
            if stop > start:
                total += _squared(flat[start:stop])
        return total

    def sum_gradients(self, scalars: Tensor, factor: float = 1.0, weigh_norm: float | None = None) -> Tensor:
        """Wait until the gradients hold the sum over all ranks; returns the sum of `scalars` over all ranks.

        This rank's gradients are multiplied by `factor`, the one that backward sent them with, if it did.
        With `weigh_norm`, the last scalar is the squared norm of what this rank sent times that number.

        `scalars` is a small vector on the gradients' device (loss, flags), which is summed in float64. A
        parameter that no rank used has no gradient, as in one process.
        """
        assert all(bucket.factor == factor for bucket in self._buckets[: self._next])
        self._weigh(factor)
        self._take_rest()
        if self._late or self._rows:
            marks = [self._mark(*key) for key in self._positions()]
        else:
            marks = [float(filled) for bucket in self._buckets for filled in bucket.filled]
        carried = self._buffers[-1]
        carried.zero_()
        carried[: len(scalars)] = scalars.detach()
        carried[self._max_scalars :] = torch.tensor(marks, dtype=torch.float64)

        def add_norm() -> None:
            # Sums are started in order, so all buckets are filled by now.
            squares = [bucket.square for bucket in self._buckets if bucket.square is not None]
            if squares and weigh_norm is not None:
                carried[len(scalars) - 1] = torch.stack(squares).sum() * weigh_norm

        fill = add_norm if weigh_norm is not None else None
        self._sending.append(self._reducer.start(len(self._buckets), fill))
        for wait in self._sending:
            wait()
        self._sending.clear()
        self._looks += 1
        # Gradients that this rank filled are used; the marks of the others matter only for the rest.
        if self._looks <= LOOKS or carried.device.type == "cpu" or not all(marks):
            marks = carried[self._max_scalars :].tolist()
            self._add_late(marks, factor)
        elif self._late or self._rows.keys() - self._sparse:
            raise PlaitError(
                "a gradient came in parts, or sparse, for the first time after many steps, which workers "
                "cannot agree on any more; give checkpoint() use_reentrant=False, and do the same in each "
                "forward"
            )
        self._set_gradients([mark > 0 for mark in marks])
        return carried[: len(scalars)].clone()

    def _positions(self) -> Iterator[tuple[int, int]]:
        """The keys of all gradients: bucket and position in it."""
        return ((i, j) for i, bucket in enumerate(self._buckets) for j in range(len(bucket.parameters)))

    def _mark(self, index: int, position: int) -> float:
        late = LATE if (index, position) in self._late else 0.0
        sparse = SPARSE if (index, position) in self._rows else 0.0
        return float(self._buckets[index].filled[position]) + late + sparse

    def _add_late(self, marks: Sequence[float], factor: float) -> None:
        """Sum the parts of gradients that came after they were sent; `marks` are summed over all ranks."""
        if max(marks, default=0.0) < LATE:
            return
        self._sparse |= {key for key, mark in zip(self._positions(), marks) if mark >= SPARSE}
        late = {key[0] for key, mark in zip(self._positions(), marks) if mark % SPARSE >= LATE}
        for index in sorted(late):
            bucket = self._buckets[index]
            parts = torch.zeros_like(bucket.flat)
            flats = parts.split([p.numel() for p in bucket.parameters])
            for position, flat in enumerate(flats):
                if (index, position) in self._late:
                    flat.copy_(self._late[index, position].reshape(-1)).mul_(factor)
            dist.all_reduce(parts, group=self._group)
            bucket.flat.add_(parts)
        self._overlaps = self._overlaps and not late

    def _use_buffers(self, buffers: Sequence[Tensor]) -> None:
        self._buffers = buffers
        for bucket, flat in zip(self._buckets, buffers):
            bucket.use_buffer(flat)

    def _weigh(self, factor: float) -> None:
        for bucket in self._buckets:
            bucket.factor = factor

    def _watch(self, leaves: Mapping[Parameter, Parameter]) -> None:
        """Take gradients from `leaves`, too, instead of those of the previous step."""
        for _, hook in self._watched:
            hook.remove()
        self._watched = []
        for index, bucket in enumerate(self._buckets) if leaves else ():
            for position, parameter in enumerate(bucket.parameters):
                if parameter in leaves:
                    leaf = leaves[parameter]
                    # The leaf does not keep its node, and its graph may be built only in backward.
                    node = get_gradient_edge(leaf).node
                    self._watched.append((node, node.register_hook(self._hook(index, position, leaf))))

    def _hook(self, index: int, position: int, leaf: Parameter | None = None) -> Callable[..., None]:
        bucket = self._buckets[index]
        left = bucket.parameters[position] if leaf is None else leaf

        def take(*_: object) -> None:
            if self._on_gradient is not None and not self._armed:
                self._on_gradient()
            if self._armed and left.grad is not None:
                self._take(index, position, left)
                if bucket.waiting == 0:
                    self._send_full()

        return take

    def _take(self, index: int, position: int, parameter: Tensor) -> None:
        bucket, grad = self._buckets[index], parameter.grad
        assert grad is not None
        parameter.grad = None
        if grad.is_sparse:
            rows = grad.coalesce().indices()[0]
            before = self._rows.get((index, position))
            self._rows[index, position] = rows if before is None else torch.cat([before, rows])
            grad = grad.to_dense()
        if not bucket.filled[position]:
            bucket.grads[position] = grad
            bucket.filled[position] = True
            bucket.waiting -= 1
        elif index < self._next:
            earlier = self._late.get((index, position))
            self._late[index, position] = grad if earlier is None else earlier + grad
        else:
            first = bucket.grads[position]
            assert first is not None
            bucket.grads[position] = first + grad

    def _send_full(self) -> None:
        while self._next < len(self._buckets) and self._buckets[self._next].waiting == 0:
            self._sending.append(self._start(self._next, self._buckets[self._next].fill))
            self._next += 1

    def _start(self, index: int, fill: Callable[[], None] | None) -> WaitForSum:
        """Start a sum in the middle of backward, which does not fail: the wait for the sum does."""
        try:
            return self._reducer.start(index, fill)
        except RuntimeError as error:
            failure = error

        def fail() -> None:
            raise failure

        return fail

    def _take_rest(self) -> None:
        """Fill gradients that the last backward pass did not reach: by those of earlier passes, or zeros."""
        for index, bucket in enumerate(self._buckets):
            for position, parameter in enumerate(bucket.parameters):
                if not bucket.filled[position] and parameter.grad is not None:
                    self._take(index, position, parameter)
                elif not bucket.filled[position]:
                    bucket.waiting -= 1
        self._send_full()

    def _set_gradients(self, used: Sequence[bool]) -> None:
        marks = iter(used)
        for index, bucket in enumerate(self._buckets):
            views = bucket.views_of(bucket.flat.clone()) if self._copy_gradients else bucket.views
            for position, (parameter, view) in enumerate(zip(bucket.parameters, views)):
                is_used = next(marks)
                if (index, position) in self._sparse:
                    parameter.grad = self._as_sparse(index, position, view)
                else:
                    parameter.grad = view if is_used else None

    def _as_sparse(self, index: int, position: int, view: Tensor) -> Tensor:
        """The summed gradient as a sparse one, with the rows of all ranks; all ranks call it together."""
        touched = torch.zeros(len(view), device=view.device)
        if (index, position) in self._rows:
            touched[self._rows[index, position]] = 1
        dist.all_reduce(touched, dist.ReduceOp.MAX, group=self._group)
        rows = touched.nonzero()[:, 0]
        return torch.sparse_coo_tensor(
            rows[None], view[rows], view.shape, check_invariants=False, is_coalesced=True
        )


def _squared(flat: Tensor) -> Tensor:
    """The squared norm, by dot products of parts: float32 sums of many millions of elements lose digits."""
    wide = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
    return torch.stack([torch.dot(part, part) for part in wide.split(DOT_ELEMENTS)]).double().sum()


def make_buckets(parameters: Sequence[Parameter]) -> list[Bucket]:
    """Group parameters, from last to first, into buckets of one type and device.

    The first bucket is small, to start early, and so is the last, which nothing is left to overlap with.
    """
    trained = [p for p in reversed(parameters) if p.requires_grad]
    sizes = [p.numel() * p.element_size() for p in trained]
    buckets: list[Bucket] = []
    members: list[Parameter] = []
    size, limit, rest, before = 0, FIRST_BUCKET_BYTES, sum(sizes), 0
    for parameter, parameter_bytes in zip(trained, sizes):
        other = bool(members) and (parameter.dtype, parameter.device) != (members[0].dtype, members[0].device)
        last = rest <= LAST_BUCKET_BYTES < rest + before
        if members and (other or size >= limit or last):
            buckets.append(Bucket(members))
            members, size, limit = [], 0, BUCKET_BYTES
        members.append(parameter)
        size += parameter_bytes
        rest, before = rest - parameter_bytes, parameter_bytes
    return [*buckets, Bucket(members)] if members else buckets
