"""Strangers at every socket of a running job: other users of the machine, other hosts of its network.

    python benchmarks/strangers.py [--hosts] [--connections 10000] [--rounds 6]

A job runs while every socket on which one of its processes listens gets garbage, forged greetings, the
recorded bytes of a real greeting, and thousands of connections that stay open: from a process of another user
(uid 65534) and, with --hosts, from a host of the same network that is none of the job's. Phases of attack
and of peace follow each other. What must hold: the job ends well, nobody gets an answer beyond the listener's
own nonce, nothing runs, no descriptor stays behind, and steps take no longer than in peace (the attackers run
at the lowest priority: their own processor time is not the question). Needs root; the job itself runs without
any capability unless there are several hosts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.hosts import Hosts

NOBODY = 65534
GREETING = b"plait/1\n" + (1).to_bytes(4, "little")


def listeners(pid: int) -> list[tuple[str, Any]]:
    """Where the job's processes listen: ("unix", name), or ("tcp", (address, port))."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    found: set[tuple[str, Any]] = set()
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            inodes = set()
            for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    link = os.readlink(descriptor)
                    if link.startswith("socket:["):
                        inodes.add(link[8:-1])
            for line in Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    address, port = fields[1].split(":")
                    host = socket.inet_ntoa(int(address, 16).to_bytes(4, "little"))
                    found.add(("tcp", (host, int(port, 16))))
            for line in Path(f"/proc/{process.pid}/net/unix").read_text().splitlines()[1:]:
                fields = line.split()
                # The flag 0x10000 is that of a socket that listens.
                if fields[3] == "00010000" and fields[6] in inodes and len(fields) > 7:
                    found.add((f"unix{int(fields[4])}", fields[7]))
    return sorted(found, key=str)


def open_to(kind: str, where: Any) -> socket.socket:
    if kind == "tcp":
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        target: Any = tuple(where)
    else:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM if kind == "unix1" else socket.SOCK_SEQPACKET)
        target = where.replace("@", "\0", 1) if where.startswith("@") else where
    if kind == "tcp":
        # A port that drops everything would make each attempt take long.
        made.setblocking(False)
        made.connect_ex(target)
    else:
        made.settimeout(0.05)
        made.connect(target)
    return made


def attack(
    sockets: list[tuple[str, Any]], count: int, rate: float, seed: int, space: str | None
) -> dict[str, int]:
    """Do all of it, as nobody, at most `rate` connections a second; what came of it."""
    enter(space)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    draw = random.Random(seed)
    told = {"tried": 0, "connected": 0, "answered": 0, "answer_bytes": 0}
    held = []
    contents = [
        lambda: b"",
        lambda: draw.randbytes(draw.randrange(1, 4096)),
        lambda: GREETING + draw.randbytes(16),
        lambda: GREETING + draw.randbytes(16) + draw.randbytes(32),
        lambda: b"GET / HTTP/1.1\r\n\r\n",
        lambda: b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x0ctouch /tmp/pw\x85R.",
        lambda: (draw.randrange(64)).to_bytes(8, "little"),
    ]
    begun = time.monotonic()
    for number in range(count):
        time.sleep(max(0.0, begun + number / rate - time.monotonic()))
        kind, where = sockets[number % len(sockets)]
        told["tried"] += 1
        try:
            connection = open_to(kind, where)
        except OSError:
            continue
        with contextlib.suppress(OSError):
            if number % 50 == 0:
                time.sleep(0.002)
            connection.sendall(draw.choice(contents)())
            told["connected"] += 1
            if number % 50 == 0:
                time.sleep(0.002)
                answer = connection.recv(4096)
                told["answered"] += bool(answer)
                told["answer_bytes"] = max(told["answer_bytes"], len(answer))
        held.append(connection)
        if len(held) > 2000:
            held.pop(0).close()
    return told


def enter(space: str | None) -> None:
    """Go to a network namespace, and run when no core has anything else to do."""
    if space is not None:
        import ctypes

        with open(f"/run/netns/{space}") as file:
            assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
    # What is measured is what the job does about strangers, not what else runs on its cores.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def be_decoy(space: str | None, address: str, told: Any) -> None:
    """Listen beside the job, drop whoever comes: what strangers cost the kernel alone."""
    enter(space)
    with socket.create_server((address, 0), backlog=512) as server:
        told.send(server.getsockname())
        held: list[socket.socket] = []
        while True:
            held.append(server.accept()[0])
            if len(held) > 64:
                held.pop(0).close()


@contextlib.contextmanager
def decoy(hosts: Hosts | None, sockets: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """A listener that is not the job's, where the job's first host is."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    space, address = None, "127.0.0.1"
    if hosts is not None:
        space, address = hosts.space("w0"), min(where[0] for kind, where in sockets if kind == "tcp")
    process = multiprocessing.get_context("spawn").Process(
        target=be_decoy, args=(space, address, there), daemon=True
    )
    process.start()
    try:
        yield "tcp", here.recv()
    finally:
        process.kill()
        process.join()


def steps_of(run: Path) -> list[tuple[float, float]]:
    """When each event of steps was written, and the seconds of a step in it."""
    found = []
    for line in (run / "events" / "rank0.jsonl").read_text().splitlines():
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if event["kind"] == "step":
                found.append((event["t"], event["seconds"]))
    return found


@contextlib.contextmanager
def job(folder: Path, hosts: Hosts | None) -> Iterator[subprocess.Popen[bytes]]:
    content: dict[str, Any] = {
        "name": "strangers",
        "model": "plait.workloads.mlp:mlp",
        "model_args": {"inputs": 64, "hidden": [512, 512]},
        "data": {"kind": "digits", "batch_size": 64},
        "optimizer": {"kind": "sgd", "lr": 0.001},
        "steps": 10**9,
        "log_every_steps": 20,
        "parallel": {"workers": 2, "threads": 1},
        "run_dir": str(folder),
    }
    if hosts is not None:
        del content["parallel"]["workers"]
        content["cluster"] = {"hosts": ["w0:1", "w1:1"], "shell": hosts.shell, "nic": "eth0"}
    (folder / "job.yaml").write_text(yaml.safe_dump(content))
    command = [sys.executable, "-m", "plait", "train", str(folder / "job.yaml"), "--run", str(folder / "run")]
    if hosts is None:
        # With no more than an ordinary user may do, and as many descriptors as a login shell gives.
        command = ["prlimit", "--nofile=1024", "setpriv", "--bounding-set=-all", "--inh-caps=-all", *command]
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", action="store_true", help="a job over two hosts, attacked from a third")
    parser.add_argument("--connections", type=int, default=10000)
    parser.add_argument("--rate", type=float, default=1e9, help="connections a second at most")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--peace-s", type=float, default=4.0)
    asked = parser.parse_args()
    hosts = Hosts() if asked.hosts else None
    folder = Path(tempfile.mkdtemp(prefix="plait-strangers-"))
    try:
        if hosts is not None:
            hosts.make("w0", "w1", "w2")
        with job(folder, hosts) as process:
            return measure(process, folder, hosts, asked)
    finally:
        if hosts is not None:
            hosts.remove()
        subprocess.run(["rm", "-rf", str(folder)], check=False)


def measure(process: subprocess.Popen[bytes], folder: Path, hosts: Hosts | None, asked: Any) -> int:
    run = folder / "run"
    end = time.monotonic() + 120
    while not (run / "events" / "rank0.jsonl").exists() or len(steps_of(run)) < 5:
        if time.monotonic() > end or process.poll() is not None:
            raise SystemExit((folder / "output.txt").read_text())
        time.sleep(0.05)
    sockets = listeners(process.pid)
    print(f"{len(sockets)} sockets listen: {sockets}")
    descriptors = _descriptors(process.pid)
    phases: list[tuple[str, float, float]] = []
    told: list[dict[str, int]] = []
    space = hosts.space("w2") if hosts is not None else None
    with decoy(hosts, sockets) as other:
        for number in range(asked.rounds):
            begun = time.time()
            time.sleep(asked.peace_s)
            phases.append(("peace", begun, time.time()))
            # On few cores the kernel's work for connections takes time from the job, whoever they are for: so
            # the same connections to a listener that is not the job's are the measure.
            for kind, aims in (("decoy", [other]), ("attack", sockets)):
                begun = time.time()
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    found = pool.apply(attack, (aims, asked.connections, asked.rate, number, space))
                phases.append((kind, begun, time.time()))
                told += [found] if kind == "attack" else []
    alive = process.poll() is None
    # A connection may take a few seconds to prove itself.
    end = time.monotonic() + 20
    while (gained := _descriptors(process.pid) - descriptors) > 8 and time.monotonic() < end:
        time.sleep(0.1)
    process.terminate()
    status = process.wait(60)
    steps = steps_of(run)
    longest_answer = max(each["answer_bytes"] for each in told)
    times = {
        kind: [s for t, s in steps for k, a, b in phases if k == kind and a + s < t < b]
        for kind in ("peace", "decoy", "attack")
    }
    medians = {kind: statistics.median(found) for kind, found in times.items()}
    slower = medians["attack"] / medians["decoy"] - 1
    print(f"attackers: {told}")
    for kind, found in times.items():
        low, middle, high = (f(found) / 20 * 1e3 for f in (min, statistics.median, max))
        print(f"a step in {kind}: {middle:.3f} ms ({low:.3f} to {high:.3f}, {len(found)} times)")
    claims = {
        "the job goes on and ends well when asked to": alive and status == 130,
        "answers are the listener's nonce and proof at most (48 bytes)": longest_answer <= 48,
        "nothing was executed": not Path("/tmp/pw").exists(),
        "no descriptor stays behind": gained <= 8,
        f"steps are at most 2% longer than beside strangers of others ({slower:+.1%})": slower <= 0.02,
    }
    for claim, holds in claims.items():
        print(f"{'holds' if holds else 'DOES NOT HOLD'}: {claim}")
    return int(not all(claims.values()))


def _descriptors(pid: int) -> int:
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(process.num_fds() for process in processes)


if __name__ == "__main__":
    sys.exit(main())
