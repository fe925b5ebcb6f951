"""Agents on the nodes of a Ray cluster: an actor in a placement group for each host.

The group reserves a host's CPUs and GPUs, and Ray queues for them. The actor holds the agent and its pipes,
so that an agent here ends, prints and is lost as one behind a shell.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, cast

from plait.core.errors import InputError, LaunchError
from plait.core.names import in_words
from plait.core.shown import shown
from plait.core.units import count_of
from plait.launcher.launchers import HostChanges, Launcher, Stream
from plait.schema.hosts import Host
from plait.schema.placement import HostAccess

# How often this process looks whether it was told to end, while Ray waits for an answer of an actor.
POLL_S = 0.2
LOOK_S = 1.0
# An actor that does not take a message for this long is lost.
WRITE_S = 60.0
# Nodes that are not there may come within this time: they are started, or an autoscaler adds them.
APPEAR_S = 60.0
# How long a host that is not needed, but would be welcome, may take to be free.
FREE_S = 2.0
# How long a node that is there may take to answer.
ANSWER_S = 3.0
# What kills an agent whose node does not answer any more.
KILLED = -9
_NODE_ID = "ray.io/node-id"
# The option that says what a host reserves; all others are arguments of ray.init.
BUNDLE = "bundle"


@dataclass(eq=False)
class ReservedNode:
    """A node of Ray that holds a host of the job, and the actor there once one was started."""

    node_id: str
    address: str
    group: Any
    bundle: int
    actor: Any = None
    streams: list[RayStream] = field(default_factory=list)


class RayLauncher(Launcher):
    """Nodes of the Ray cluster that `cluster.options` name by the arguments of `ray.init`."""

    def __init__(self, access: HostAccess) -> None:
        self._slots = access.slots
        self._options = dict(access.options)
        self._asked_bundle = self._options.pop(BUNDLE, None)
        self._taken: dict[str, ReservedNode] = {}
        self._groups: list[Any] = []
        self._bundle: dict[str, float] = {}
        self._most = 0
        self._lost_ids: set[str] = set()
        self._watch = NodeWatch(lambda: self._ray)
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
        slots = self._choose_bundle()
        reserved = self._reserve(fewest)
        for node in self._nodes():
            if len(reserved) < most and node["NodeID"] not in {each.node_id for each in reserved}:
                reserved += self._reserve_node(node, FREE_S)
        # Ranks stay the same from one attempt to the next as far as hosts do.
        reserved.sort(key=lambda each: (ipaddress.ip_address(each.address), each.node_id))
        self._taken = {_name(each, reserved): each for each in reserved}
        self._watch.start({each.node_id for each in reserved})
        return tuple(Host(name, slots, each.address) for name, each in self._taken.items())

    def _is_lost(self, name: str) -> bool:
        """Whether the node of a host does not answer: Ray may take half a minute to miss one."""
        node = self._taken.get(name)
        for each in self._ray.nodes() if node is not None else ():
            if each["NodeID"] == node.node_id and each["Alive"]:
                with contextlib.suppress(OSError):
                    socket.create_connection((node.address, each["NodeManagerPort"]), ANSWER_S).close()
                    return False
        return node is not None

    def _choose_bundle(self) -> int:
        """Decide what each host reserves; returns its number of workers: its GPUs, or one."""
        gpus = [int(node["Resources"].get("GPU", 0)) for node in self._nodes()]
        on_gpus = min((count for count in gpus if count), default=0)
        slots = self._slots or max(1, on_gpus)
        usual = {"CPU": float(slots)} | ({"GPU": float(slots)} if on_gpus >= slots else {})
        self._bundle = usual if self._asked_bundle is None else _checked_bundle(self._asked_bundle)
        return slots

    def _nodes(self) -> list[Any]:
        """The nodes that are there, and can have a host."""
        return [
            node
            for node in self._ray.nodes()
            if node["Alive"]
            and node["NodeID"] not in self._lost_ids
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

    def _reserve_node(self, node: Mapping[str, Any], wait_s: float) -> list[ReservedNode]:
        """Reserve this node; nothing if it is not free within `wait_s`."""
        group = self._make_group(1, {_NODE_ID: node["NodeID"]})
        if not group.wait(wait_s):
            self._groups.remove(group)
            self._ray.util.remove_placement_group(group)
            return []
        return [ReservedNode(node["NodeID"], node["NodeManagerAddress"], group, 0)]

    def _make_group(self, count: int, selector: Mapping[str, str]) -> Any:
        group = self._ray.util.placement_group(
            [dict(self._bundle)] * count,
            strategy="STRICT_SPREAD",
            bundle_label_selector=[dict(selector)] * count if selector else None,
        )
        self._groups.append(group)
        return group

    def start(self, host: Host, command: Sequence[str], environment: Mapping[str, str]) -> Stream:
        node = self._taken[host.name]
        if node.actor is None:
            node.actor = self._make_actor(node)
        stream = RayStream(self._ray, node.actor, command, environment)
        node.streams.append(stream)
        return stream

    def _make_actor(self, node: ReservedNode) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from plait.launcher.launchers import ray_agent

        self._ray.cloudpickle.register_pickle_by_value(ray_agent)
        remote = self._ray.remote(ray_agent.AgentHolder)
        others = {name: count for name, count in self._bundle.items() if name not in ("CPU", "GPU")}
        made = remote.options(
            num_cpus=self._bundle.get("CPU", 0),
            num_gpus=self._bundle.get("GPU", 0),
            resources=others,
            max_restarts=0,
            # Two streams that are read, the end that is waited for, and a message, at the same time.
            max_concurrency=8,
            scheduling_strategy=PlacementGroupSchedulingStrategy(node.group, node.bundle),
        )
        return made.remote()

    def reached_by(self, host: Host) -> str:
        return f"an actor of Ray on node {self._taken[host.name].node_id[:8]}"

    def changed(self) -> HostChanges:
        gone = self._watch.gone
        return HostChanges(tuple(name for name, node in self._taken.items() if node.node_id in gone))

    def notice(self) -> float | None:
        return self._watch.seconds_left({node.node_id for node in self._taken.values()})

    def give_back(self, hosts: Sequence[Host] = ()) -> None:
        """End all actors and remove all groups: the job has its hosts together, and takes them again so."""
        self._watch.stop()
        for node in self._taken.values():
            for stream in node.streams:
                stream.kill()
            if node.actor is not None:
                with contextlib.suppress(Exception):  # its node may be gone
                    self._ray.kill(node.actor)
                node.actor = None
        for group in self._groups:
            with contextlib.suppress(Exception):
                self._ray.util.remove_placement_group(group)
        self._groups = []


class RayStream:
    """An agent in an actor, as a process with pipes."""

    def __init__(self, ray: Any, actor: Any, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._ray = ray
        self._actor = actor
        self._killed = threading.Event()
        self._status: int | None = None
        # The agent's number in the actor, once it is known, and its exit status.
        self._number = actor.start.remote(list(command), dict(environment))
        self._end: Any = None
        self.stdin = cast("IO[str]", _RayInput(self._call))
        self.stdout = self._lines("stdout")
        self.stderr = self._lines("stderr")

    def _call(self, method: str, *arguments: Any, timeout_s: float = math.inf) -> Any:
        """The answer of a method of the actor; OSError if there will be none."""
        end = time.monotonic() + timeout_s
        number = self._await(self._number, end)
        return self._await(getattr(self._actor, method).remote(number, *arguments), end)

    def _await(self, reference: Any, end: float) -> Any:
        while not self._ray.wait([reference], timeout=POLL_S)[0]:
            if self._killed.is_set() or time.monotonic() > end:
                raise OSError("the actor does not answer")
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as failure:
            raise OSError(in_words(failure.cause)) from None
        except self._ray.exceptions.RayError as failure:
            raise OSError(in_words(failure).splitlines()[0]) from None

    def _lines(self, name: str) -> Iterator[str]:
        while True:
            try:
                lines = self._call("lines", name)
            except OSError as failure:
                if name == "stderr" and not self._killed.is_set():
                    yield f"{failure}\n"
                return
            if not lines:
                return
            yield from lines

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (math.inf if timeout is None else timeout)
        while self._status is None:
            self._status = self._look(0.0 if timeout == 0.0 else POLL_S)
            if self._status is None and self._killed.is_set():
                self._status = KILLED
            if self._status is None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired("the agent", timeout or 0.0)
        return self._status

    def _look(self, wait_s: float) -> int | None:
        """Its exit status, or None if it has not ended within `wait_s`."""
        try:
            if self._end is None and self._ray.wait([self._number], timeout=wait_s)[0]:
                self._end = self._actor.wait.remote(self._ray.get(self._number))
            if self._end is not None and self._ray.wait([self._end], timeout=wait_s)[0]:
                return int(self._ray.get(self._end))
        except self._ray.exceptions.RayError:
            return KILLED
        return None

    def kill(self) -> None:
        with contextlib.suppress(Exception):  # the actor may be gone
            if self._ray.wait([self._number], timeout=0.0)[0]:
                self._actor.kill.remote(self._ray.get(self._number))
        self._killed.set()


class _RayInput:
    """The input of an agent. Each text has been taken when `write` returns, so their order stays."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def write(self, text: str) -> int:
        self._call("write", text, timeout_s=WRITE_S)
        return len(text)

    def flush(self) -> None:
        """Nothing waits here."""

    def close(self) -> None:
        self._call("close", timeout_s=WRITE_S)


class NodeWatch:
    """Which nodes are gone, and which are taken away; looked up in a thread, since Ray may not answer."""

    def __init__(self, ray: Callable[[], Any]) -> None:
        self._ray = ray
        self._ended = threading.Event()
        self.gone: frozenset[str] = frozenset()
        # By node, when it is taken away.
        self._deadlines: Mapping[str, float] = {}

    def start(self, nodes: Collection[str]) -> None:
        self._ended = threading.Event()
        self.gone = frozenset()
        threading.Thread(target=self._look, args=(set(nodes), self._ended), daemon=True).start()

    def stop(self) -> None:
        self._ended.set()

    def seconds_left(self, nodes: Collection[str]) -> float | None:
        """Until the first of `nodes` is taken away; None if that is not known of any."""
        deadlines = [at for node, at in self._deadlines.items() if node in nodes]
        return max(0.0, min(deadlines) - time.time()) if deadlines else None

    def _look(self, nodes: set[str], ended: threading.Event) -> None:
        while not ended.wait(LOOK_S):
            with contextlib.suppress(Exception):  # the head may be gone: the agents' own links tell
                alive = {node["NodeID"] for node in self._ray().nodes() if node["Alive"]}
                self.gone = frozenset(nodes - alive)
                self._deadlines = _draining(nodes)


def _draining(nodes: set[str]) -> dict[str, float]:
    """The nodes that Ray drains, and when each is taken away; a deadline of 0 is one that is not known."""
    from ray._private.state import state

    found = getattr(state, "get_draining_nodes", dict)()
    now = time.time()
    return {node: at_ms / 1000 if at_ms else now + 1e6 for node, at_ms in found.items() if node in nodes}


def _connect(options: Mapping[str, Any]) -> Any:
    """The module ray, connected to a cluster that is there; the script's own connection if it has one."""
    try:
        import ray
    except ImportError:
        raise InputError(
            "cluster.on: found 'ray', but the package ray is not installed here; pip install \"plait[ray]\""
        ) from None
    if ray.is_initialized():
        return ray
    arguments = {"address": "auto", "log_to_driver": False, "logging_level": "ERROR", **options}
    try:
        ray.init(**arguments)
    except (TypeError, ValueError, RuntimeError) as failure:
        raise InputError(
            f"cluster.options: ray.init refuses {shown(dict(options))}: {in_words(failure)}"
        ) from None
    except ConnectionError as failure:
        raise InputError(
            f"cluster.on: found 'ray', but no cluster answers at address {shown(arguments['address'])}: "
            f"{in_words(failure)}; start one with ray start --head, or give its address: "
            f"cluster.options: {{address: HOST:PORT}}"
        ) from None
    return ray


def _checked_bundle(found: Any) -> dict[str, float]:
    is_map = isinstance(found, Mapping) and bool(found)
    if not is_map or not all(isinstance(n, int | float) and n >= 0 for n in found.values()):
        raise InputError(
            f"cluster.options.{BUNDLE}: found {shown(found)}, expected what each host reserves, such as "
            f"{{CPU: 8, GPU: 4}}"
        )
    return {str(name): float(count) for name, count in found.items() if count}


def _shown(bundle: Mapping[str, float]) -> str:
    return " and ".join(f"{count:g} {name}" for name, count in bundle.items())


def _name(node: ReservedNode, among: Sequence[ReservedNode]) -> str:
    """A host's name: its address, and more where several nodes have it."""
    is_one = sum(each.address == node.address for each in among) == 1
    return node.address if is_one else f"{node.address}-{node.node_id[:8]}"
