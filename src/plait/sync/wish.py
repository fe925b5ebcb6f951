"""The topology that a user asks for: a name, a file with graphs, or a function that makes them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from plait.core.names import did_you_mean, resolve
from plait.sync.topology import NATIVE, TOPOLOGIES, Hosts, Topology, TopologyError, from_graphs, make_topology

AUTO = "auto"
DEFAULT = "default"
KEY = "parallel.topology"
NAMES = (DEFAULT, NATIVE, AUTO, *TOPOLOGIES)


@dataclass(frozen=True)
class TopologyWish:
    """`name` as the user wrote it; where that is a file, the `graphs` in it."""

    name: str = DEFAULT
    graphs: tuple[Mapping[str, Any], ...] = ()

    @property
    def by_name(self) -> bool:
        """Whether it is one of ours, which fits any workers."""
        return self.name.partition(":")[0] in NAMES


def read_wish(text: str) -> TopologyWish:
    """What `parallel.topology` asks for; a file is read here, so that workers need not have it."""
    wish = TopologyWish(text)
    if wish.by_name:
        return wish
    if text.endswith((".json", ".yaml", ".yml")):
        return TopologyWish(text, tuple(_read(Path(text))))
    if ":" in text:
        return wish
    raise TopologyError(
        f"{KEY}: found {text!r}, expected {', '.join(NAMES)}, a file (.json, .yaml) or "
        f"package.module:function{did_you_mean(text, NAMES)}"
    )


def _read(path: Path) -> list[Any]:
    try:
        # JSON is YAML too.
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as failure:
        raise TopologyError(f"{KEY}: {path} cannot be read: {failure}") from None
    except yaml.YAMLError as failure:
        raise TopologyError(f"{KEY}: {path} is neither JSON nor YAML: {failure}") from None
    graphs = content.get("graphs") if isinstance(content, dict) else None
    if not isinstance(graphs, list) or not graphs:
        raise TopologyError(f"{KEY}: {path} has no list of graphs; expected graphs: [{{reduce: [[1, 0]]}}]")
    return graphs


def find_topology(wish: TopologyWish, hosts: Hosts) -> Topology | None:
    """The topology wished for, over ranks on these hosts; None for the backend's own way.

    A `package.module:function` is called with the host of each rank and returns graphs as a file holds
    them. `auto` is not found but chosen, by measuring. The default is for workers on CPUs: on one host it
    goes through the memory that they share, which takes a half to a fifth of gloo's time.
    """
    assert wish.name != AUTO
    if wish.name == DEFAULT:
        shares = len(set(hosts)) == 1 and hasattr(os, "memfd_create")
        return make_topology("binary-tree", hosts) if shares else None
    if wish.graphs:
        return from_graphs(wish.graphs, len(hosts), wish.name)
    if wish.name == NATIVE:
        return None
    if wish.by_name:
        return make_topology(wish.name, hosts)
    return from_graphs(resolve(wish.name, KEY, TopologyError)(list(hosts)), len(hosts), wish.name)
