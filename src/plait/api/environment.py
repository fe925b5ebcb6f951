"""Who started this process, and as which rank of how many: what the environment variables say."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from plait.core.errors import InputError

# Where Plait's own `launch` puts the store of its workers.
STORE = "PLAIT_STORE"
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# By launcher: the variables of the rank, the world size, and the number of processes on this host.
_MPI = {
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
}
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
        rank, size = _rank_of("plait.launch", variables, "RANK", "WORLD_SIZE")
        return Environment("plait.launch", rank, size, store=variables[STORE])
    if "RANK" in variables or "WORLD_SIZE" in variables:
        return _from_torchrun(variables)
    # Only srun sets it: a batch script has SLURM_PROCID, too, but runs once.
    if "SLURM_STEP_NUM_TASKS" in variables:
        return _from_srun(variables)
    for launcher, names in _MPI.items():
        if names[1] in variables:
            return _from_mpi(launcher, variables, *names)
    return Environment("python")


def _from_torchrun(variables: Mapping[str, str]) -> Environment:
    missing = [name for name in _TORCHRUN if name not in variables]
    if missing:
        present = [name for name in _TORCHRUN if name in variables]
        raise InputError(
            f"the environment has {' and '.join(present)}, but no {' and no '.join(missing)}: start the "
            f"script with torchrun, which sets all of {', '.join(_TORCHRUN)}, or unset "
            f"{' and '.join(present)} to run it as a single process"
        )
    rank, size = _rank_of("torchrun", variables, "RANK", "WORLD_SIZE")
    port = _number("torchrun", variables, "MASTER_PORT")
    return Environment("torchrun", rank, size, variables["MASTER_ADDR"], port)


def _from_srun(variables: Mapping[str, str]) -> Environment:
    rank, size = _rank_of("srun", variables, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    nodes = variables.get("SLURM_STEP_NODELIST", "127.0.0.1")
    step = f"{variables.get('SLURM_JOB_ID', '')}.{variables.get('SLURM_STEP_ID', '')}"
    address = variables.get("MASTER_ADDR") or first_node(nodes)
    return Environment("srun", rank, size, address, _port_of(variables, step))


def _from_mpi(launcher: str, variables: Mapping[str, str], *names: str) -> Environment:
    rank, size = _rank_of(launcher, variables, *names[:2])
    address = variables.get("MASTER_ADDR")
    if address is None:
        if variables.get(names[2]) != str(size):
            raise InputError(
                f"{launcher} started {size} processes, and they may be on several hosts: say where the first "
                "one is, with the variable MASTER_ADDR (for example mpirun -x MASTER_ADDR=$(hostname) ...)"
            )
        address = "127.0.0.1"
    job = variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid") or ""
    return Environment(launcher, rank, size, address, _port_of(variables, job))


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


def _rank_of(launcher: str, variables: Mapping[str, str], rank: str, size: str) -> tuple[int, int]:
    found, of = _number(launcher, variables, rank), _number(launcher, variables, size)
    if not 0 <= found < of:
        raise InputError(f"{rank}: found {found}, expected 0 to {of - 1} ({size} is {of})")
    return found, of


def _number(launcher: str, variables: Mapping[str, str], name: str) -> int:
    if name not in variables:
        raise InputError(f"{name} is not set, but {launcher} sets it: start all processes in the same way")
    if not variables[name].strip().isdecimal():
        raise InputError(f"{name}: found {variables[name]!r}, expected a whole number")
    return int(variables[name])
