"""Who started this process, and as which rank of how many: what the environment variables say."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from plait.core.errors import InputError

# Where Plait's own `launch` puts the store of its workers.
STORE = "PLAIT_STORE"
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class _Variables:
    """How a launcher tells its processes which they are, and how to start a single process instead.

    `rank`, `size` and `local_size`, the number of processes on this host, are names of variables.
    """

    launcher: str
    rank: str
    size: str
    local_size: str
    alone: str


_TORCH = _Variables("torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "with python alone")
# Only srun sets the second: a batch script has SLURM_PROCID, too, but runs once.
_SLURM = _Variables(
    "srun",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_TASKS_PER_NODE",
    "with srun -n 1 or in the batch script itself",
)
_OMPI, _MV2 = "OMPI_COMM_WORLD", "MV2_COMM_WORLD"
_MPI = (
    _Variables("Open MPI", f"{_OMPI}_RANK", f"{_OMPI}_SIZE", f"{_OMPI}_LOCAL_SIZE", "without mpirun"),
    _Variables("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", "without mpiexec"),
    _Variables("MVAPICH2", f"{_MV2}_RANK", f"{_MV2}_SIZE", f"{_MV2}_LOCAL_SIZE", "without mpirun"),
)
# Ports that are derived from the number of a job, below those that systems hand out.
_FIRST_PORT, _PORTS = 20000, 10000


@dataclass(frozen=True)
class Environment:
    """The rank of this process among `world_size`, and where they meet.

    They meet at `address` and `port` or, if they are on one host, in the file `store`.
    """

    launcher: str
    rank: int = 0
    world_size: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    store: str | None = None


def find_environment(variables: Mapping[str, str]) -> Environment:
    """The environment that `variables` describe: torchrun's, srun's, mpirun's, Plait's or a single process.

    InputError if some variables of a launcher are missing or contradict each other.
    """
    if STORE in variables:
        rank, size = _rank_of(replace(_TORCH, launcher="plait.launch"), variables)
        return Environment("plait.launch", rank, size, store=variables[STORE])
    if "RANK" in variables or "WORLD_SIZE" in variables:
        return _from_torchrun(variables)
    if _SLURM.size in variables:
        return _from_srun(variables)
    for mpi in _MPI:
        if mpi.size in variables:
            return _from_mpi(mpi, variables)
    return Environment("python")


def check_alone(variables: Mapping[str, str] = os.environ) -> None:
    """Raise InputError if another launcher has started several processes: each would start all workers."""
    for each in (_TORCH, _SLURM, *_MPI):
        count = variables.get(each.size, "")
        # WORLD_SIZE alone may be a script's own variable.
        is_known = each is not _TORCH or "TORCHELASTIC_RUN_ID" in variables
        if is_known and count.isdecimal() and int(count) > 1:
            raise InputError(
                f"found {count} processes started by {each.launcher} ({each.size}), of which each would do "
                f"the whole job: Plait starts its own workers; run it once, {each.alone}, and say how many "
                f"workers there are with -np or parallel.workers and on which hosts with -H or --on; or "
                f"train with these processes: -m plait.worker JOB"
            )


def _from_torchrun(variables: Mapping[str, str]) -> Environment:
    missing = [name for name in _TORCHRUN if name not in variables]
    if missing:
        present = [name for name in _TORCHRUN if name in variables]
        raise InputError(
            f"the environment has {' and '.join(present)}, but no {' and no '.join(missing)}: start the "
            f"script with torchrun, which sets all of {', '.join(_TORCHRUN)}, or unset "
            f"{' and '.join(present)} to run it as a single process"
        )
    rank, size = _rank_of(_TORCH, variables)
    port = _number("torchrun", variables, "MASTER_PORT")
    return Environment("torchrun", rank, size, variables["MASTER_ADDR"], port)


def _from_srun(variables: Mapping[str, str]) -> Environment:
    rank, size = _rank_of(_SLURM, variables)
    nodes = variables.get("SLURM_STEP_NODELIST", "127.0.0.1")
    step = f"{variables.get('SLURM_JOB_ID', '')}.{variables.get('SLURM_STEP_ID', '')}"
    address = variables.get("MASTER_ADDR") or first_node(nodes)
    return Environment("srun", rank, size, address, _port_of(variables, step))


def _from_mpi(mpi: _Variables, variables: Mapping[str, str]) -> Environment:
    rank, size = _rank_of(mpi, variables)
    address = variables.get("MASTER_ADDR")
    if address is None:
        if variables.get(mpi.local_size) != str(size):
            raise InputError(
                f"{mpi.launcher} started {size} processes, and they may be on several hosts: say where "
                "the first one is, with the variable MASTER_ADDR (for example mpirun -x "
                "MASTER_ADDR=$(hostname) ...)"
            )
        address = "127.0.0.1"
    job = variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid") or ""
    return Environment(mpi.launcher, rank, size, address, _port_of(variables, job))


def first_node(nodes: str) -> str:
    """The first host of a list in Slurm's notation, such as `gpu[07-09,12],cpu1`."""
    head = re.match(r"[^,\[\]]+(\[[^\]]+\]|[^,\[\]])*", nodes)
    if head is None:
        raise InputError(f"SLURM_STEP_NODELIST: found {nodes!r}, expected a list of hosts; set MASTER_ADDR")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", head[0])


def _port_of(variables: Mapping[str, str], job: str) -> int:
    """The port at which the processes of `job` meet: MASTER_PORT, or one that is derived from its name."""
    if "MASTER_PORT" in variables:
        return _number("MASTER_PORT", variables, "MASTER_PORT")
    return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS


def _rank_of(names: _Variables, variables: Mapping[str, str]) -> tuple[int, int]:
    rank, size = (_number(names.launcher, variables, name) for name in (names.rank, names.size))
    if not 0 <= rank < size:
        raise InputError(f"{names.rank}: found {rank}, expected 0 to {size - 1} ({names.size} is {size})")
    return rank, size


def _number(launcher: str, variables: Mapping[str, str], name: str) -> int:
    if name not in variables:
        raise InputError(f"{name} is not set, but {launcher} sets it: start all processes in the same way")
    if not variables[name].strip().isdecimal():
        raise InputError(f"{name}: found {variables[name]!r}, expected a whole number")
    return int(variables[name])
