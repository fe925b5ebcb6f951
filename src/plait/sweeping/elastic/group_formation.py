"""Which workers of a sweep train arrays together, in each version of the membership.

No I/O: the coordinator calls it with memberships and with the questions of workers.
"""

from __future__ import annotations

from dataclasses import replace

from plait.launcher.membership import Membership


class WorkerGroups:
    """The groups of `size` workers. A group stays together as long as all of its workers are members.

    Members without a group form new ones in the order of their ranks; those that are left over wait. No
    number of a group is used twice. Its workers connect once all of them have arrived.
    """

    def __init__(self, size: int, membership: Membership) -> None:
        self._size = size
        self._made = 0
        self._groups: dict[int, tuple[int, ...]] = {}
        # By group, the workers that have arrived.
        self._arrived: dict[int, set[int]] = {}
        self.follow(membership)

    def follow(self, now: Membership) -> None:
        """Dissolve groups that have lost a worker, and form others."""
        self._membership = now
        self._groups = {n: group for n, group in self._groups.items() if set(group) <= set(now.members)}
        self._form()

    def dissolve(self, number: int) -> None:
        """Form the group `number` again, with another number: its workers cannot communicate."""
        if self._groups.pop(number, None) is not None:
            self._form()

    def _form(self) -> None:
        taken = {worker for group in self._groups.values() for worker in group}
        free = [worker for worker in self._membership.members if worker not in taken]
        for first in range(0, len(free) - self._size + 1, self._size):
            self._made += 1
            self._groups[self._made] = tuple(free[first : first + self._size])
            self._arrived[self._made] = set()

    @property
    def firsts(self) -> list[int]:
        """The first worker of each group, which asks for all of it."""
        return [group[0] for group in self._groups.values()]

    def number_of(self, worker: int) -> int | None:
        """The group of a worker; None if it waits for others, or is no member."""
        return next((number for number, group in self._groups.items() if worker in group), None)

    def arrive(self, worker: int) -> Membership | None:
        """The group of a worker that is free to join it, once all others of the group are; else None."""
        number = self.number_of(worker)
        if number is None:
            return None
        self._arrived[number].add(worker)
        members = self._groups[number]
        if self._arrived[number] < set(members):
            return None
        now = self._membership
        hosts = tuple(now.hosts[now.rank_of(each)] for each in members)
        return replace(now, members=members, hosts=hosts, group=number)

    def withdraw(self, worker: int) -> None:
        """The worker ends instead of joining its group, unless the others of it may have been told to."""
        number = self.number_of(worker)
        if number is not None:
            self._arrived[number].discard(worker)
