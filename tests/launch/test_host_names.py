"""Hosts as people name them: none of it can become an option or a command of the shell that reaches them."""

from __future__ import annotations

import pytest

from plait.core.errors import InputError
from plait.schema.hosts import Host, parse_hosts


def test_names_addresses_and_users_are_hosts():
    found = parse_hosts(["w0:2", " w1 ", "10.0.0.1:4", "user@host-3.example:007", "é"], "-H")
    assert [host.slots for host in found] == [2, 1, 4, 7, 1]
    assert found[3] == Host("user@host-3.example", 7)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("", "expected 'host' or 'host:workers'"),
        ("w0:0", "expected 'host' or 'host:workers'"),
        ("w0:-1", "expected 'host' or 'host:workers'"),
        ("w0:٣", "expected 'host' or 'host:workers'"),
        ("w0:²", "expected 'host' or 'host:workers'"),
        ("w0:" + "9" * 5000, "expected 'host' or 'host:workers'"),
        ("w0:70000", "expected at most 65,536 workers on a host"),
        ("-oProxyCommand=touch:1", "expected a host's name or address"),
        ("-F/tmp/x", "no '-' in front"),
        ("w\0:1", "expected a host's name or address"),
        ("a b:1", "expected a host's name or address"),
        ("a$(touch x):1", "expected a host's name or address"),
        ("a;b", "expected a host's name or address"),
        ("'a'", "expected a host's name or address"),
    ],
)
def test_what_is_no_host_is_refused(entry: str, words: str):
    with pytest.raises(InputError) as caught:
        parse_hosts([entry], "-H")
    assert str(caught.value).startswith("-H: found ")
    assert words in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_host_named_twice_is_refused():
    with pytest.raises(InputError, match="'w0' is listed twice"):
        parse_hosts(["w0:1", "w1", "w0:2"], "-H")
