"""Topologies as pure values: every one spans the workers, and what does not is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from plait.schema.topology import (
    ROOTED,
    TOPOLOGIES,
    Route,
    TopologyError,
    from_graphs,
    make_topology,
)
from plait.schema.topology_spec import TopologySpec, build_topology, check_topology, read_topology_spec
from plait.sync.allreduce.autotune import resolve_topology
from plait.sync.allreduce.chunking import cut_buffer
from plait.sync.allreduce.reducers import whole_world
from support.meeting import rendezvous_of

hosts_of_ranks = st.lists(st.sampled_from("abcd"), min_size=1, max_size=8)


def reaches_root(parents: tuple[int, ...], rank: int) -> int:
    """The root above `rank`, found by walking; more steps than ranks would be a circle."""
    for _ in parents:
        rank = parents[rank]
    assert parents[rank] == rank
    return rank


def walk_sums(route: Route) -> list[int]:
    """How often each rank's part is in the result that rank gets, done the slow way."""
    size = len(route.reduce)

    def parts(rank: int) -> list[int]:
        own = [int(r == rank) for r in range(size)]
        return [sum(column) for column in zip(own, *map(parts, route.reduce_children(rank)))]

    result = parts(route.root)
    got = {route.root}
    waiting = [route.root]
    while waiting:
        for child in route.broadcast_children(waiting.pop()):
            assert child not in got
            got.add(child)
            waiting.append(child)
    assert got == set(range(size))
    return result


@given(st.sampled_from(sorted(TOPOLOGIES)), hosts_of_ranks)
def test_every_topology_brings_every_part_to_every_rank_exactly_once(name: str, hosts: list[str]):
    topology = make_topology(name, hosts)
    assert topology.size == len(hosts)
    for route in topology.routes:
        for parents in (route.reduce, route.broadcast):
            assert {reaches_root(parents, rank) for rank in range(len(hosts))} == {route.root}
        assert walk_sums(route) == [1] * len(hosts)


@given(st.sampled_from(ROOTED), hosts_of_ranks, st.integers(0, 7))
def test_a_root_can_be_chosen(name: str, hosts: list[str], root: int):
    root %= len(hosts)
    (route,) = make_topology(f"{name}:{root}", hosts).routes
    assert route.root == root


@given(hosts_of_ranks)
def test_trees_of_hosts_cross_between_hosts_once_for_each_further_host(hosts: list[str]):
    for name in ("tree", "binary-tree-star", "multi-star", "multi-binary-tree-star"):
        topology = make_topology(name, hosts)
        for route in topology.routes:
            crossing = sum(hosts[rank] != hosts[parent] for rank, parent in enumerate(route.reduce))
            assert crossing == len(set(hosts)) - 1
        if name.startswith("multi"):
            assert {hosts[route.root] for route in topology.routes} == set(hosts)
            assert len(topology.routes) == len(set(hosts))


@pytest.mark.parametrize(("name", "roots"), [("ring", 5), ("clique", 5), ("star", 1), ("binary-tree", 1)])
def test_work_is_shared_by_as_many_roots_as_the_topology_has(name: str, roots: int):
    topology = make_topology(name, ["a"] * 5)
    assert {route.root for route in topology.routes} == set(range(roots))


def test_a_ring_sends_to_the_next_rank_only():
    for route in make_topology("ring", ["a"] * 4).routes:
        for rank in range(4):
            assert route.reduce_parent(rank) in (None, (rank + 1) % 4)
            assert route.broadcast_children(rank) in ((), ((rank + 1) % 4,))


@given(st.sampled_from(sorted(TOPOLOGIES)), hosts_of_ranks)
def test_the_edges_of_any_topology_read_back_give_the_same_topology(name: str, hosts: list[str]):
    topology = make_topology(name, hosts)
    graphs = [
        {
            "reduce": [[r, p] for r, p in enumerate(route.reduce) if r != p],
            "broadcast": [[p, r] for r, p in enumerate(route.broadcast) if r != p],
        }
        for route in topology.routes
    ]
    assert from_graphs(graphs, len(hosts), "x").routes == topology.routes


def test_without_a_broadcast_the_result_goes_back_the_way_the_sums_came():
    (route,) = from_graphs([{"reduce": [[2, 1], [1, 0]]}], 3, "x").routes
    assert route.broadcast == route.reduce == (0, 0, 1)


@pytest.mark.parametrize(
    ("graph", "words"),
    [
        ({"reduce": [[0, 1], [1, 2], [2, 1]]}, "a cycle, 1 - 2 - 1"),
        ({"reduce": [[1, 1], [2, 0]]}, "a cycle, 1 - 1"),
        ({"reduce": [[1, 0]]}, "missing rank 2"),
        ({"reduce": []}, "missing ranks 0, 1, 2"),
        ({"reduce": [[1, 0], [2, 5], [0, 7]]}, "unknown ranks 5, 7; the job has ranks 0 to 2"),
        ({"reduce": [[1, 0], [1, 2]]}, "rank 1 sends its sum to ranks 0 and 2"),
        ({"reduce": [[1, 0], [2, 0]], "broadcast": [[0, 1], [2, 1]]}, "rank 1 gets the result from"),
        ({"reduce": [[1, 0], [2, 0]], "broadcast": [[1, 0], [1, 2]]}, "two roots: sums end at rank 0"),
        ({"reduce": [[1, 0], [2, 0]], "broadcast": [[0, 1]]}, "missing rank 2"),
        ({"reduce": "all"}, "found 'all', expected edges"),
        ({"reduce": [[1, 0, 2]]}, r"found \[1, 0, 2\], expected edges"),
        ({"reduced": [[1, 0]]}, "expected reduce and broadcast"),
        ({"reduce": [[1, 0], [2, 0]], "broadcst": []}, "did you mean 'broadcast'"),
    ],
)
def test_what_is_wrong_with_a_users_graph_is_named(graph: object, words: str):
    with pytest.raises(TopologyError, match=words):
        from_graphs([graph], 3, "g.json")


def test_two_trees_next_to_each_other_are_two_roots():
    with pytest.raises(TopologyError, match="two roots or more, ranks 1, 3"):
        from_graphs([{"reduce": [[0, 1], [2, 3]]}], 4, "g.json")


@given(st.lists(st.tuples(st.integers(-1, 5), st.integers(-1, 5)), max_size=7), st.integers(1, 5))
def test_a_graph_is_taken_only_if_it_is_one_tree_over_all_ranks(edges: list[tuple[int, int]], size: int):
    try:
        (route,) = from_graphs([{"reduce": edges}], size, "g").routes
    except TopologyError:
        simple = all(0 <= a < size and 0 <= b < size for a, b in edges) and len(set(edges)) == size - 1
        senders = {a for a, _ in edges}
        joined = {0} if size else set()
        for _ in range(size):
            joined |= {r for e in edges if set(e) & joined for r in e}
        assert not (simple and len(senders) == size - 1 and joined == set(range(size)))
    else:
        assert walk_sums(route) == [1] * size


@pytest.mark.parametrize(
    ("name", "words"),
    [("rign", "did you mean 'ring'"), ("star:4", "a root from 0 to 3"), ("ring:1", "after one of star")],
)
def test_unknown_names_and_roots_are_refused(name: str, words: str):
    with pytest.raises(TopologyError, match=words):
        make_topology(name, ["a"] * 4)


def test_a_long_chain_is_a_tree_and_a_long_cycle_is_named_in_few_words():
    size = 20_000
    (route,) = from_graphs([{"reduce": [[i, i + 1] for i in range(size - 1)]}], size, "g").routes
    assert route.root == size - 1
    with pytest.raises(TopologyError, match="a cycle, 0 - 1 - 2") as caught:
        from_graphs([{"reduce": [[i, (i + 1) % size] for i in range(size)]}], size, "g")
    assert len(str(caught.value)) < 300
    with pytest.raises(TopologyError, match="missing ranks 2, 3, 4.* more") as caught:
        from_graphs([{"reduce": [[0, 1]]}], size, "g")
    assert len(str(caught.value)) < 300


class Odd(list[Any]):
    def __len__(self) -> int:
        raise RuntimeError("no length")


def odd(hosts: list[str]) -> Odd:
    return Odd()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "os:system",
            "'os:system' failed with TypeError: .*expected a function that takes the host of each rank",
        ),
        ("sys:exit", "'sys:exit' failed with SystemExit"),
        ("math:pi", "'math:pi' failed with TypeError: 'float' object is not callable"),
        ("builtins:print", "builtins:print: found None, expected a list of graphs"),
        ("test_topology_graphs:odd", "'test_topology_graphs:odd' failed with RuntimeError: no length"),
        ("os:nothing", "os has no 'nothing'"),
        ("star:" + "9" * 5000, "found 'star:999.*, expected a root from 0 to 1"),
        ("star:١", "expected a root from 0 to 1"),
        ("native:3", "native has no root to choose"),
        ("graphs.json", "graphs.json: no such file"),
    ],
)
def test_whatever_goes_wrong_with_a_topology_of_ones_own_is_refused_in_one_sentence(name: str, words: str):
    with pytest.raises(TopologyError, match=words) as caught:
        build_topology(read_topology_spec(name), ["a", "a"])
    assert len(str(caught.value)) < 500


def test_a_function_is_called_with_the_hosts_by_workers_and_not_while_a_job_is_checked(tmp_path, monkeypatch):
    (tmp_path / "my_graphs.py").write_text(
        "calls = []\n"
        "def chain(hosts):\n"
        "    calls.append(hosts)\n"
        "    return [{'reduce': [[i, i - 1] for i in range(1, len(hosts))]}]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import my_graphs

    spec = read_topology_spec("my_graphs:chain")
    check_topology(spec, 3)
    assert my_graphs.calls == []
    topology = build_topology(spec, ["a", "a", "b"])
    assert topology is not None
    assert topology.routes[0].reduce == (0, 0, 1)
    assert my_graphs.calls == [["a", "a", "b"]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("graphs: [", "graphs.yaml:1: not YAML"),
        ("graphs: !!int x", "graphs.yaml:1: found 'x', expected a whole number"),
        ("graphs: " + "[" * 100, "nested too deeply"),
        ("a: &a [" + "1, " * 300 + "]\ngraphs: [" + "*a, " * 300 + "]\n", "too many values"),
        ("graphs: 3", "has no list of graphs; expected graphs"),
        ("graphs: [{reduce: [[1:30, 0]]}]", r"found \['1:30', 0\], expected edges"),
    ],
)
def test_a_file_of_graphs_that_is_none_is_refused(tmp_path, text: str, words: str):
    path = tmp_path / "graphs.yaml"
    path.write_text(text)
    with pytest.raises(TopologyError, match=words):
        build_topology(read_topology_spec(str(path)), ["a", "a"])


@given(
    st.integers(0, 5000),
    st.sampled_from([1, 2, 4, 8]),
    st.lists(st.integers(0, 3000), min_size=1, max_size=8),
)
def test_pieces_cover_a_buffer_once_and_even_out_the_routes(count: int, item: int, loads: list[int]):
    cuts = cut_buffer(count, item, loads, most=512, least=64)
    assert [i for cut in cuts for i in range(cut.start, cut.stop)] == list(range(count))
    sizes = [(cut.stop - cut.start) * item for cut in cuts]
    assert all(0 < size <= 512 + item for size in sizes)
    assert max(sizes, default=0) - min(sizes, default=0) <= item
    after = list(loads)
    for cut, size in zip(cuts, sizes):
        after[cut.route] += size
    largest = max(sizes, default=0)
    assert max(after) - min(after) <= max(max(loads) - min(loads), largest)


@pytest.mark.parametrize(
    ("hosts", "device", "name"),
    [("aaa", "cpu", "binary-tree"), ("aab", "cpu", None), ("aaa", "cuda", None)],
)
def test_by_default_cpu_workers_of_one_host_sum_in_a_tree_and_others_the_backends_way(hosts, device, name):
    members = whole_world(rendezvous_of(0, hosts, dist.HashStore()))
    topology, chosen = resolve_topology(TopologySpec(), members, 1, torch.device(device))
    assert (topology and topology.name, chosen) == (name, None)
