"""`Elastic`: workers of a loop come, go and are lost between two steps, and the others go on."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Never, cast

import torch

from plait.adapt.members import BACKEND, ElasticMembers, WorkerLeft, loss_of, most_advanced
from plait.api.data_parallel import DataParallel
from plait.api.elastic_state import LoopState, check_loop
from plait.api.joined_workers import JoinedWorker
from plait.api.step_rules import StepRules
from plait.comm.collectives import all_gather_values
from plait.comm.data_group import await_others
from plait.core.errors import InputError
from plait.core.run_events import WorkersChanged
from plait.launcher.display import Silent
from plait.launcher.membership import Membership
from plait.launcher.worker_process import LaunchedWorker

# How often the first worker reports its steps to the supervisor.
REPORT_S = 1.0


class Elastic(StepRules):
    """Lets workers of a loop come, go and be lost between two steps; the others go on in their processes.

    It is given the model, its optimizer and by name whatever else changes from step to step: schedulers,
    loaders, anything with `state_dict` and `load_state_dict`, or a dict. The loop stays as it is.

    If a worker is lost in a step, `optimizer.step()` leaves the weights of the others as they were, what was
    registered is set back, and the loader gives the batch again, in shares for those that are left. A worker
    that joins waits in `Elastic(...)` until it has model, optimizer and registered state of the others. So
    all samples are used once, and the weights are those of one process with the same batches.

    Workers change if Plait's launcher has started them (`plait run`, `plait.launch(elastic=...)`). In other
    worlds, and in one process, they are fixed: the loop runs as it is.

    Attributes:
        step: the steps that were taken; a step that is taken again counts once.
        changes: a record of each change: `step`, `members` (the worker numbers after it), `joined`, `left`,
            `lost`, and `seconds`, how long steps were paused.

    Examples:
        ```python
        x = torch.randn(60, 8)
        model = plait.DataParallel(nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        loader = plait.DataLoader(torch.utils.data.TensorDataset(x), batch_size=12)
        elastic = plait.Elastic(model, optimizer, loader=loader)
        while loader.epoch < 2:
            for (inputs,) in loader:
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
        ```
    """

    compares_loaders = False

    def __init__(
        self, model: DataParallel, optimizer: torch.optim.Optimizer, *unnamed: Never, **state: Any
    ) -> None:
        check_loop(model, optimizer, unnamed)
        self.model, self.world = model, model.world
        self.step = 0
        self.changes: list[WorkersChanged] = []
        self._state = LoopState(model, optimizer, state)
        worker = self.world.launched or cast("LaunchedWorker", JoinedWorker(self.world, Silent()))
        self._members = ElasticMembers(worker, self._join)
        self.keeps_buffers = self._members.can_change
        # How to find the next members, once a change is due, and whether a worker was lost.
        self._find: Callable[[], Membership] | None = None
        self._was_lost = False
        # Whether the last step that was begun is completed: nothing is left to take again.
        self._is_complete = True
        # Whether this worker is at the end of its loop, takes no more steps, and has left the others.
        self._is_over = self._is_leaving = self._has_left = False
        self._has_warned = False
        # Whether the workers have changed since the model was connected with them.
        self._has_changed = False
        self._reported = time.monotonic()
        self._follow(optimizer)
        if self._members.is_joining:
            self._find = worker.await_membership
            self._apply_change()
        else:
            self._take_up(was_lost=False)

    @property
    def worker(self) -> int:
        """The number of this worker, which stays when ranks change, and is not used again."""
        return self._members.worker.id

    def steps(self, total: int) -> Iterator[int]:
        """The numbers of the steps from now on, below `total`, for loops without a `plait.DataLoader`.

        The number of a step that is taken again is given again.
        """
        while True:
            self.change_if_due(at_end=self.step >= total)
            if self.step >= total:
                return
            self.begin()
            yield self.step

    def resize(self, workers: int) -> None:
        """Ask for that number of workers; new ones join when they are ready, after some step.

        One worker or all of them call it.
        """
        self._check_can_change("resize")
        self._members.worker.ask_to_resize(workers, "the loop")

    def leave(self) -> None:
        """End this worker by SystemExit; the others go on without it, and take a step that it has begun."""
        self._check_can_change("leave")
        self._end()
        raise SystemExit(0)

    def finish(self) -> None:
        """Wait until all workers are at the end of the loop; others go on without this one.

        The launcher calls it at the end of a worker's function or script.
        """
        self._is_over = True
        if self._members.can_change:
            self._end()

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer, registered state and the number of steps, for a checkpoint between two steps."""
        return {"step": self.step, **self._state.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; all workers load it before the loop."""
        self._state.load_state_dict(state)
        self.step = state["step"]

    def _check_can_change(self, what: str) -> None:
        if not self._members.can_change:
            raise InputError(
                f"Elastic.{what}: the workers of this world are fixed; start the script with plait run or "
                "plait.launch(..., elastic=True)"
            )

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Be asked by the model, the optimizer and the loaders."""
        for loader in self._state.loaders():
            if loader.world is not self.world:
                raise InputError(
                    "Elastic: found a loader of another world than the model's; give both the same"
                )
            loader.rules = self
        self.model.rules = self
        optimizer.register_step_pre_hook(self._before_update)
        optimizer.register_step_post_hook(self._after_update)
        self.world.at_end.append(self.finish)

    def _before_update(self, optimizer: torch.optim.Optimizer, args: Any, named: Any) -> None:
        if any(value is not None for value in (*args[1:], *named.values())):
            raise InputError(
                "Elastic: optimizer.step was given a closure, which computes gradients in the middle of an "
                "update that could not be taken again; call backward before it"
            )
        if self._is_complete:
            raise InputError(
                "Elastic: optimizer.step was called without a new batch of a registered loader; give Elastic "
                "the plait.DataLoader that the loop iterates over (loader=loader), or loop over "
                "elastic.steps(n), and call optimizer.step once in a step"
            )
        if self.model.is_broken:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None  # optimizers leave such parameters as they are

    def _after_update(self, *_: Any) -> None:
        if self.model.is_broken:
            return
        self.step += 1
        self._is_complete = True
        now = time.monotonic()
        if self.world.rank == 0 and self._members.can_change and now - self._reported >= REPORT_S:
            self._reported = now
            self._members.worker.report({"step": self.step, "steps": None})

    def _end(self) -> None:
        """Take part in steps of the others without samples until all are at the end, or go on without it."""
        self._is_leaving = True
        while self.world.world_size > 1 and not self._has_left:
            if self._find is None and self._is_end_of_all():
                break
            self._apply_change()
        self._has_left = True

    def _is_end_of_all(self) -> bool:
        try:
            _, leaving, *_ = self.model.sum_nothing()
            if leaving == self.world.world_size:
                await_others(self.world.rendezvous)
        except RuntimeError as failure:
            if not self.lose(failure):
                raise
            return False
        if leaving < self.world.world_size:
            self._members.worker.ask_to_leave()
            self._find = self._members.agree_on_next
        return leaving == self.world.world_size

    def flags(self) -> list[float]:
        """Whether this worker knows of a change, takes no more steps, is at its end; its learning rate."""
        is_asked = self._members.is_asked
        return [float(is_asked), float(self._is_leaving), float(self._is_over), self._state.rate()]

    def are_gradients_kept(self, flags: Sequence[float]) -> bool:
        asked, leaving, over, rates = flags
        if leaving:
            if over:
                self._warn_of_end()
            self._members.pause()
            self._find = self._members.agree_on_next
            return False
        mean, rate = rates / self.world.world_size, self._state.rate()
        if not math.isclose(mean, rate, rel_tol=1e-9):
            raise InputError(
                f"Elastic: found the learning rate {rate:g} on worker {self.worker}, but {mean:g} in the "
                f"mean of all workers in step {self.step}, which would have unlike weights; register "
                "what changes it: plait.Elastic(..., scheduler=scheduler), and give all the same values"
            )
        if asked:
            self._find = self._members.agree
        return True

    def _warn_of_end(self) -> None:
        """Say once that others are at the end of their loop, and this one goes on."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"Elastic: other workers are at the end of their loop since step {self.step}, "
                f"and worker {self.worker} goes on without them. If that is not meant, let the loop end by "
                "what all have in common: while loader.epoch < epochs, instead of for epoch in range(epochs)",
                stacklevel=2,
            )

    def lose(self, failure: RuntimeError) -> bool:
        loss = loss_of(self._members.worker, failure) if self._members.can_change else None
        if loss is None:
            return False
        self._members.pause()
        self._find, self._was_lost = partial(self._members.after, loss), True
        return True

    def change_if_due(self, at_end: bool) -> bool:
        self._state.check_frozen()
        if self._members.is_asked and self._find is None and self._is_complete and not at_end:
            self._look()
        is_between = self._is_complete and not at_end
        if self._find is None or not (is_between or self.model.is_broken or self._was_lost):
            return False
        self._apply_change()
        if self._has_left:
            raise SystemExit(0)
        return True

    def _look(self) -> None:
        """Find a change without a step of the others: a loss, or that of a worker alone."""
        loss = self._members.worker.memberships.loss()
        if loss is not None:
            self.lose(loss)
        elif self.world.world_size == 1:
            self._find = self._members.agree

    def begin(self) -> None:
        if self._members.can_change and self.world.world_size > 1:
            self._state.watch_frozen()
            if self._is_complete:
                self._state.keep()
        self._is_complete = False

    def _apply_change(self) -> None:
        assert self._find is not None
        if not self._is_complete:
            self._state.undo()
            self._is_complete = True
        find, was_lost, self._find, self._was_lost = self._find, self._was_lost, None, False
        self._has_changed = True
        try:
            self._members.go_on_among(find, self.model.close, self._take_up, was_lost)
        except WorkerLeft:
            self._has_left = True

    def _join(self) -> None:
        worker = self._members.worker
        self.world.follow(worker)
        if worker.world_size > 1:
            worker.join(BACKEND)

    def _take_up(self, was_lost: bool) -> None:
        """Go on with the most advanced state that a member has; all members call it together."""
        world, members = self.world, self._members
        before = -1 if members.is_joining else self.step
        mine: list[Any] = [before, self._state.names, self.model.topology, self._is_over]
        of_all = all_gather_values(mine) if world.world_size > 1 else [mine]
        source = most_advanced([(step, 0) for step, *_ in of_all])
        step, names, topology, is_over = of_all[source]
        is_current = before == step
        self._state.check_names(names, source, world.rank)
        if any(there != step for there, *_ in of_all):
            self._state.send(source, world.rank, is_current)
        self.step, self.is_at_end = step, is_over and not is_current
        if members.can_change:
            if self._has_changed:
                self.model.topology = topology
                self.model.connect()
            self.model.follow_losses(members.worker.memberships)
        for loader in self._state.loaders() if world.world_size > 1 else ():
            loader.check_alike()
        members.is_joining = False
        change = members.report_joined(self.step)
        if change is not None:
            self.changes.append(change)
