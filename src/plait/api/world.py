"""The processes that run a script together: `init` finds and connects them, however they were started."""

from __future__ import annotations

import os
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from plait.adapt.members import BACKEND
from plait.comm.data_group import abort_all
from plait.comm.groups import join_world
from plait.comm.links.cuda_ipc import name_of
from plait.comm.rendezvous import Rendezvous
from plait.core.errors import InputError, LaunchError
from plait.core.shown import shown
from plait.launcher.environment import Environment, find_environment
from plait.launcher.worker_process import LaunchedWorker
from plait.schema.hosts import interface_of
from plait.sync.allreduce.reducers import Members, whole_world

TIMEOUT_S = 300.0


@dataclass(eq=False)
class World:
    """This process among those that run the script together.

    `hosts` names the host of each rank, and `device` is the device of this process: workers of one host take
    its GPUs in turn. `launcher` says who started it.

    If workers come and go (`plait.Elastic`), ranks and their number are the present ones. A worker that joins
    has rank -1 and a world of size 0 until it is a member.

    Examples:
        ```python
        world = plait.init()
        if world.is_first:
            torch.save({}, "checkpoint.pt")
        ```
    """

    rank: int
    local_rank: int
    world_size: int
    hosts: tuple[str, ...]
    device: torch.device
    launcher: str
    rendezvous: Rendezvous
    # The worker of a supervisor, whose members may change; None if the script has a fixed world.
    launched: LaunchedWorker | None = None
    # What Plait's own launcher calls when the script has ended.
    at_end: list[Callable[[], None]] = field(default_factory=list)
    # The samples of the batch that a `plait.DataLoader` gave last, of this worker and of all.
    batch: tuple[int, int] = (0, 0)

    def follow(self, worker: LaunchedWorker) -> None:
        """Take over the members that `worker` has entered."""
        self.rank, self.hosts, self.world_size = worker.rank, worker.hosts, worker.world_size
        self.rendezvous = worker.rendezvous

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which usually prints and saves."""
        return self.rank == 0

    @property
    def members(self) -> Members:
        """All workers, for sums over a topology."""
        return whole_world(self.rendezvous)

    def close(self) -> None:
        """Leave the process group; called by all at the end."""
        global _world
        _world = None
        abort_all(self.rendezvous)
        if dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_world: World | None = None
_launched: LaunchedWorker | None = None
# Where this process has met others, and how often. A store that is closed by all would remove its file, also
# if one of them has opened it again.
_stores: dict[Environment, dist.Store] = {}
_joins = Counter[Environment]()


def set_launched(worker: LaunchedWorker) -> None:
    """Let `init` return the world of `worker`, which Plait's supervisor has started."""
    global _launched
    _launched = worker


def finish() -> None:
    """Do what is left to do at the end of the script, unless it has closed its world itself."""
    for each in _world.at_end if _world is not None else ():
        each()


def init(device: str | torch.device = "auto", timeout_s: float | None = None) -> World:
    """Connect this process with the others that run the same script; returns its `World`.

    The processes may be started by torchrun, srun, mpirun, `plait.launch` or `plait run`. A process that was
    started without them is a world of one. If torch.distributed is initialized already, its processes are
    taken; its process group must have a backend for the CPU. Called again, it returns the same world, and
    refuses another device or time limit.

    `device` is `auto` (a GPU of this host if there is one), `cpu`, `cuda` or a device. `timeout_s` limits all
    waits for other processes, and is 300 s unless given; under `plait run` it is that of its supervisor.

    Examples:
        ```python
        world = plait.init()
        print(f"worker {world.rank} of {world.world_size} on {world.device}")
        ```
    """
    global _world
    if timeout_s is not None and not (isinstance(timeout_s, (int, float)) and timeout_s > 0):
        raise InputError(f"timeout_s: found {shown(timeout_s)}, expected seconds, more than 0")
    if _world is None:
        make = _from_torch if dist.is_initialized() else _join
        _world = make(device, TIMEOUT_S if timeout_s is None else timeout_s)
    else:
        _check_same(_world, device, timeout_s)
    return _world


def _check_same(world: World, device: str | torch.device, timeout_s: float | None) -> None:
    """Refuse what another call of `init` asks for and the world has not."""
    asked = None
    if device != "auto" and (chosen := choose_device(device, world.local_rank)) != world.device:
        asked = f"device {chosen}", str(world.device)
    elif _launched is None and timeout_s not in (None, world.rendezvous.timeout_s):
        asked = f"timeout_s={timeout_s:g}", f"{world.rendezvous.timeout_s:g}"
    if asked is not None:
        raise InputError(
            f"init: found {asked[0]}, but these processes are connected already, with {asked[1]} "
            "(by plait.init, or an object that was made before it); call plait.init with its arguments first"
        )


def world_of_one(device: str | torch.device, timeout_s: float = TIMEOUT_S) -> World:
    """This process alone, apart from the world that `init` returns."""
    return _make_world(Environment("python", 0, 1), dist.HashStore(), device, timeout_s)


def _from_torch(device: str | torch.device, timeout_s: float) -> World:
    """The world of a process group that the script has created."""
    if "cpu" not in (config := dist.get_backend_config()):
        raise InputError(
            f"init: torch.distributed is initialized with {config!r}, which sends no tensors of the CPU, as "
            f"Plait has to; leave the backend out of init_process_group, write 'cpu:gloo,cuda:nccl', or call "
            f"only plait.init()"
        )
    store = dist.PrefixStore("plait", distributed_c10d._get_default_store())
    known = Environment("torch.distributed", dist.get_rank(), dist.get_world_size())
    return _make_world(known, store, device, timeout_s)


def _from_launched(worker: LaunchedWorker, wanted: str | torch.device) -> World:
    """The world of a worker whose members may change; one that joins is not yet among them."""
    device = choose_device(wanted, worker.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    nowhere = Rendezvous(dist.HashStore(), b"", -1, ())
    world = World(-1, worker.local_rank, 0, (), device, "plait run", nowhere, worker)
    if worker.rank >= 0:
        world.follow(worker)
    if world.world_size > 1:
        worker.join(BACKEND)
    return world


def _join(device: str | torch.device, timeout_s: float) -> World:
    if _launched is not None:
        return _from_launched(_launched, device)
    found = find_environment(os.environ)
    if found not in _stores:
        _stores[found] = _open_store(found, timeout_s)
    _joins[found] += 1
    # The keys of a world that was closed stay in the store.
    store = dist.PrefixStore(f"plait/join/{_joins[found]}", _stores[found])
    store.set_timeout(timedelta(seconds=timeout_s))
    world = _make_world(found, store, device, timeout_s)
    if world.world_size > 1 or found.launcher != "python":
        join_world(choose_backend(world.rendezvous, world.device), world.rendezvous)
    return world


def _open_store(found: Environment, timeout_s: float) -> dist.Store:
    """The store where the processes meet."""
    if found.launcher == "python":
        return dist.HashStore()
    timeout = timedelta(seconds=timeout_s)
    if found.store is not None:
        store: dist.Store = dist.FileStore(found.store, found.world_size)
        store.set_timeout(timeout)
        return store
    # Torch's own way: torchrun may hold the store itself.
    os.environ |= {
        "RANK": str(found.rank),
        "WORLD_SIZE": str(found.world_size),
        "MASTER_ADDR": found.address,
        "MASTER_PORT": str(found.port),
    }
    try:
        store, _, _ = next(iter(dist.rendezvous("env://", timeout=timeout)))
    except (OSError, RuntimeError) as failure:  # torch's errors are RuntimeErrors
        raise LaunchError(
            f"no meeting with the other {found.world_size - 1} processes at {found.address}:{found.port} "
            f"within {timeout_s:g} s ({str(failure).splitlines()[0]}); {found.launcher} must start all "
            f"{found.world_size} of them, and rank 0 must be on {found.address} (variable MASTER_ADDR)"
        ) from failure
    # The store of torchrun outlives its workers: those of an earlier attempt have left their addresses.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"plait/attempt/{attempt}", store)


def _make_world(found: Environment, store: dist.Store, wanted: str | torch.device, timeout_s: float) -> World:
    """The world, after all processes have exchanged where they are."""
    rank, size = found.rank, found.world_size
    secret, address = secrets.token_bytes(32), "127.0.0.1"
    hosts: tuple[str, ...] = (socket.gethostname(),)
    if size > 1:
        if rank == 0:
            store.set("secret", secret.hex())
        store.set(f"host/{rank}", f"{_memory_marker()} {socket.gethostname()}")
        hosts = name_hosts([store.get(f"host/{other}").decode() for other in range(size)])
        secret = bytes.fromhex(store.get("secret").decode())
        if len(set(hosts)) > 1:
            address = _own_address(found.address)
            _use_interface(address)
    local_rank = hosts[:rank].count(hosts[rank])
    device = choose_device(wanted, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    meeting = Rendezvous(store, secret, rank, hosts, address, timeout_s)
    return World(rank, local_rank, size, hosts, device, found.launcher, meeting)


def _memory_marker() -> str:
    """Equal for two processes that can connect by local sockets and share memory."""
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    return f"{boot.read_text().strip()}/{network.stat().st_ino}" if network.exists() else "-"


def name_hosts(marked: Sequence[str]) -> tuple[str, ...]:
    """A name for the host of each rank, from a marker of its memory and its own name.

    Containers may have the same name without sharing memory; they are numbered.
    """
    markers: dict[str, list[str]] = {}
    for each in marked:
        marker, name = each.split(" ", 1)
        known = markers.setdefault(name, [])
        if marker not in known:
            known.append(marker)
    names = []
    for each in marked:
        marker, name = each.split(" ", 1)
        number = markers[name].index(marker)
        names.append(name if number == 0 else f"{name}#{number + 1}")
    return tuple(names)


def _own_address(peer: str) -> str:
    """The address of this host on the network of `peer`."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))  # sends nothing
            address = str(probe.getsockname()[0])
    except OSError:
        address = "127.0.0.1"
    # The host of rank 0 may reach itself by loopback.
    return socket.gethostbyname(socket.gethostname()) if address.startswith("127.") else address


def _use_interface(address: str) -> None:
    """Let gloo and NCCL use the interface of `address`, unless the user has named one.

    gloo takes the address that the host's name resolves to, which on Debian is one of loopback.
    """
    if (nic := interface_of(address)) is not None:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, nic)


def choose_device(wanted: str | torch.device, local_rank: int) -> torch.device:
    """The device of a worker; workers of one host take its GPUs in turn."""
    if isinstance(wanted, torch.device) or wanted not in ("auto", "cpu", "cuda"):
        try:
            return torch.device(wanted)
        except (RuntimeError, TypeError):
            raise InputError(
                f"device: found {wanted!r}, expected auto, cpu, cuda or a device of torch, such as cuda:1"
            ) from None
    if wanted == "cuda" and not torch.cuda.is_available():
        raise InputError("device: found 'cuda', but torch sees no GPU here; use device: cpu or auto")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def choose_backend(rendezvous: Rendezvous, device: torch.device) -> str:
    """The backend of the process group of all workers, which call it together.

    NCCL where every worker has a GPU to itself, else gloo, which goes through the host. A launcher may show
    each worker only its own GPU (CUDA_VISIBLE_DEVICES), so GPUs are compared by their names.
    """
    store = rendezvous.store
    store.set(f"plait/gpu/{rendezvous.rank}", name_of(device) if device.type == "cuda" else "")
    gpus = {store.get(f"plait/gpu/{rank}") for rank in range(len(rendezvous.hosts))}
    return "cpu:gloo,cuda:nccl" if len(gpus - {b""}) == len(rendezvous.hosts) else "gloo"
