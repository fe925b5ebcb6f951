"""Agents on the nodes of a Ray cluster: an actor in a placement group for each host.

The group reserves a host's CPUs and GPUs, and Ray queues for them. The actor holds the agent and its pipes,
so that an agent here ends, prints and is lost as one behind a shell.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.core.errors import InputError, LaunchError
from plait.core.names import check_extra, in_words
from plait.core.shown import shown
from plait.core.units import count_of
from plait.launcher.launchers import HostChanges, Launcher, Stream
from plait.launcher.launchers.ray_stream import RayStream
from plait.launcher.launchers.ray_watch import LOOK_S, NodeWatch, draining_nodes
from plait.schema.hosts import Host
from plait.schema.placement import HostAccess

# Nodes that are not there may come within this time: they are started, or an autoscaler adds them.
APPEAR_S = 60.0
# How long a host that is not needed, but would be welcome, may take to be free.
FREE_S = 2.0
# How long a node that is there may take to answer.
ANSWER_S = 3.0
_NODE_ID = "ray.io/node-id"
# The option that says what a host reserves; all others are arguments of ray.init.
BUNDLE = "bundle"


@dataclass(frozen=True)
class ReservedNode:
    """A node of Ray and the bundle that holds a host of the job there."""

    node_id: str
    address: str
    group: Any
    bundle: int = 0


class RayLauncher(Launcher):
    """Nodes of the Ray cluster that `cluster.options` name by the arguments of `ray.init`."""

    has_others = True

    def __init__(self, access: HostAccess) -> None:
        self._asked_slots = access.slots
        self._options = dict(access.options)
        self._asked_bundle = self._options.pop(BUNDLE, None)
        self._taken: dict[str, ReservedNode] = {}
        self._offered: dict[str, Mapping[str, Any]] = {}
        self._groups: list[Any] = []
        self._actors: list[Any] = []
        self._streams: list[RayStream] = []
        self._bundle: dict[str, float] = {}
        self._slots, self._most = 0, 0
        self._lost_ids: set[str] = set()
        self._watch = NodeWatch()
        self._connected: Any = None

    @property
    def _ray(self) -> Any:
        """The module ray, connected to the cluster."""
        if self._connected is None:
            self._connected = _connect(self._options)
        return self._connected

    def take_hosts(self, fewest: int, most: int, lost: Collection[str] = ()) -> tuple[Host, ...]:
        self._lost_ids |= {self._taken[name].node_id for name in lost if self._is_lost(name)}
        self.give_back()
        self._most = most
        self._choose_bundle()
        reserved = self._reserve(fewest)
        for node in self._nodes():
            if len(reserved) < most and node["NodeID"] not in {each.node_id for each in reserved}:
                reserved += self._reserve_if_free(node)
        # Ranks stay the same from one attempt to the next as far as hosts do.
        reserved.sort(key=lambda each: (ipaddress.ip_address(each.address), each.node_id))
        addresses = [each.address for each in reserved]
        self._taken = {_name(each.node_id, each.address, addresses): each for each in reserved}
        for name, each in self._taken.items():
            self._make_actor(name, each)
        self._watch = NodeWatch(self._ray.nodes, self._nodes)
        return tuple(Host(name, self._slots, each.address) for name, each in self._taken.items())

    def _is_lost(self, name: str) -> bool:
        """Whether the node of a host does not answer: Ray may take half a minute to miss one."""
        if name not in self._taken:
            return False
        node = self._taken[name]
        for each in self._ray.nodes():
            if each["NodeID"] == node.node_id and each["Alive"]:
                with contextlib.suppress(OSError):
                    socket.create_connection((node.address, each["NodeManagerPort"]), ANSWER_S).close()
                    return False
        return True

    def _choose_bundle(self) -> None:
        """Decide how many workers a host has, one for each GPU unless the job says it, and its bundle."""
        gpus = [int(node["Resources"].get("GPU", 0)) for node in self._ray.nodes() if node["Alive"]]
        on_gpus = min((count for count in gpus if count), default=0)
        slots = self._slots = self._asked_slots or max(1, on_gpus)
        usual = {"CPU": float(slots)} | ({"GPU": float(slots)} if on_gpus >= slots else {})
        self._bundle = usual if self._asked_bundle is None else _checked_bundle(self._asked_bundle)

    def _nodes(self) -> list[Mapping[str, Any]]:
        """The nodes that are there to stay, and can have a host."""
        away = self._lost_ids | draining_nodes().keys()
        return [
            node
            for node in self._ray.nodes()
            if node["Alive"]
            and node["NodeID"] not in away
            and all(node["Resources"].get(name, 0) >= count for name, count in self._bundle.items())
        ]

    def _reserve(self, count: int) -> list[ReservedNode]:
        """Wait until Ray has reserved `count` nodes, each for one host."""
        selector = {_NODE_ID: f"!in({','.join(sorted(self._lost_ids))})"} if self._lost_ids else {}
        group = self._make_group(count, selector)
        short_since = time.monotonic()
        while not group.wait(LOOK_S):
            there = len(self._nodes())
            if there >= count:  # they are in use, and become free some time
                short_since = time.monotonic()
            elif time.monotonic() > short_since + APPEAR_S:
                self.give_back()
                raise LaunchError(
                    f"Ray has {count_of(there, 'node')} with {_shown(self._bundle)} each, expected {count} "
                    f"(cluster.nodes, cluster.slots), and no other came within {APPEAR_S:.0f} s; ask for "
                    f"fewer nodes or slots, or start more nodes with ray start"
                )
        places = self._ray.util.placement_group_table(group)["bundles_to_node_id"]
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes()}
        return [ReservedNode(places[i], addresses[places[i]], group, i) for i in range(count)]

    def _reserve_if_free(self, node: Mapping[str, Any]) -> list[ReservedNode]:
        """Reserve a node that is welcome, but not needed; nothing if it is in use."""
        group = self._make_group(1, {_NODE_ID: node["NodeID"]})
        if group.wait(FREE_S):
            return [ReservedNode(node["NodeID"], node["NodeManagerAddress"], group)]
        self._groups.remove(group)
        self._ray.util.remove_placement_group(group)
        return []

    def _make_group(self, count: int, selector: Mapping[str, str]) -> Any:
        group = self._ray.util.placement_group(
            [dict(self._bundle)] * count,
            strategy="STRICT_SPREAD",
            bundle_label_selector=[dict(selector)] * count if selector else None,
        )
        self._groups.append(group)
        return group

    def _make_actor(self, name: str, node: ReservedNode) -> None:
        """Start the actor of a host, without waiting for it: it takes calls before it runs."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from plait.launcher.launchers import pipes, ray_agent

        for module in (pipes, ray_agent):
            self._ray.cloudpickle.register_pickle_by_value(module)
        others = {name: count for name, count in self._bundle.items() if name not in ("CPU", "GPU")}
        actor = self._ray.remote(ray_agent.AgentHolder).options(
            name=_actor_name(name),
            num_cpus=self._bundle.get("CPU", 0),
            # Ray lets it see these GPUs, and the agent and its workers inherit that.
            num_gpus=self._bundle.get("GPU", 0),
            resources=others,
            max_restarts=0,
            # Two streams that are read, the end that is waited for, and a message, at the same time.
            max_concurrency=8,
            scheduling_strategy=PlacementGroupSchedulingStrategy(node.group, node.bundle),
        )
        self._actors.append(actor.remote())

    def start(self, host: Host, command: Sequence[str], environment: Mapping[str, str]) -> Stream:
        if host.name in self._offered:
            node = self._offered.pop(host.name)
            group = self._make_group(1, {_NODE_ID: node["NodeID"]})
            self._taken[host.name] = ReservedNode(node["NodeID"], node["NodeManagerAddress"], group)
            self._make_actor(host.name, self._taken[host.name])
        try:
            # By its name: measurements on the job's hosts use another launcher.
            actor = self._ray.get_actor(_actor_name(host.name))
        except ValueError as failure:
            raise LaunchError(f"its actor is gone: {in_words(failure)}") from None
        stream = RayStream(self._ray, actor, command, environment)
        self._streams.append(stream)
        return stream

    def reached_by(self, host: Host) -> str:
        return "an actor of Ray"

    def changed(self) -> HostChanges:
        lost = tuple(name for name, node in self._taken.items() if self._watch.is_gone(node.node_id))
        new = []
        for node in self._watch.take_new() if len(self._taken) < self._most else ():
            address = node["NodeManagerAddress"]
            known = [each.address for each in self._taken.values() if not self._watch.is_gone(each.node_id)]
            host = Host(_name(node["NodeID"], address, [*known, address]), self._slots, address)
            self._offered[host.name] = node
            new.append(host)
        return HostChanges(lost, tuple(new))

    def notice(self) -> float | None:
        return self._watch.seconds_left({node.node_id for node in self._taken.values()})

    def give_back(self, hosts: Sequence[Host] = ()) -> None:
        """End all actors and remove all groups: the job has its hosts together, and takes them again so."""
        self._watch.end()
        for stream in self._streams:
            stream.kill()
        for actor in self._actors:
            with contextlib.suppress(Exception):  # its node may be gone
                self._ray.kill(actor)
        for group in self._groups:
            with contextlib.suppress(Exception):
                self._ray.util.remove_placement_group(group)
        self._streams, self._actors, self._groups = [], [], []


def _connect(options: Mapping[str, Any]) -> Any:
    """The module ray, connected to a cluster that is there; the script's own connection if it has one."""
    check_extra("ray", "cluster.on: ray")
    import ray

    if ray.is_initialized():
        return ray
    address = str(options.get("address") or os.environ.get("RAY_ADDRESS") or "auto")
    arguments = {"log_to_driver": False, "logging_level": "ERROR", **options, "address": address}
    try:
        _check_answers(address)
        ray.init(**arguments)
    except (TypeError, ValueError, RuntimeError) as failure:
        raise InputError(
            f"cluster.options: ray.init refuses {shown(dict(options))}: {in_words(failure)}"
        ) from None
    except OSError as failure:
        raise InputError(
            f"cluster.on: found 'ray', but no cluster answers at address {shown(address)}: "
            f"{in_words(failure)}; start one with ray start --head, or give its address: "
            f"cluster.options: {{address: HOST:PORT}}"
        ) from None
    return ray


def _check_answers(address: str) -> None:
    """Raise OSError if nothing listens at HOST:PORT, for which Ray would try again for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()


def _checked_bundle(bundle: Any) -> dict[str, float]:
    is_map = isinstance(bundle, Mapping) and bool(bundle)
    if not is_map or not all(isinstance(n, int | float) and n >= 0 for n in bundle.values()):
        raise InputError(
            f"cluster.options.{BUNDLE}: found {shown(bundle)}, expected what each host reserves, such as "
            f"{{CPU: 8, GPU: 4}}"
        )
    return {str(name): float(count) for name, count in bundle.items() if count}


def _shown(bundle: Mapping[str, float]) -> str:
    return " and ".join(f"{count:g} {name}" for name, count in bundle.items())


def _name(node_id: str, address: str, among: Sequence[str]) -> str:
    """A host's name: its address, and more where several nodes have it."""
    return address if among.count(address) == 1 else f"{address}-{node_id[:8]}"


def _actor_name(host: str) -> str:
    """The name of a host's actor among those of this process."""
    return f"plait-{os.getpid()}-{host}"
