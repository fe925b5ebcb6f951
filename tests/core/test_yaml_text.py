"""YAML as people write it: values as in YAML 1.2, and nothing that takes all time or memory."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.yaml_text import YamlError, dump_yaml, load_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1:30", "1:30"),
        ("1:30:00", "1:30:00"),
        ("010", 10),
        ("0o10", 8),
        ("0x10", 16),
        ("1_000", "1_000"),
        ("2020-01-01", "2020-01-01"),
        ("2020-99-99", "2020-99-99"),
        ("1e-3", 0.001),
        ("-.5", -0.5),
        ("3.", 3.0),
        ("yes", "yes"),
        ("off", "off"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        (".inf", math.inf),
        ("'1'", "1"),
        ("!!str 1", "1"),
        ("!!float 1", 1.0),
        ("{a: [1, 2.5, x]}", {"a": [1, 2.5, "x"]}),
        ("{a: &x [1], b: *x}", {"a": [1], "b": [1]}),
        ("a: &x {k: 1}\nb: {<<: *x, l: 2}", {"a": {"k": 1}, "b": {"k": 1, "l": 2}}),
        ('"\\ud83d\\ude00"', "😀"),
    ],
)
def test_text_is_read_as_people_mean_it(text: str, value: object):
    found = load_yaml(text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1", "not YAML"),
        ("a: 1\na: 2", "a: given twice; give it once"),
        ("!!int abc", "found 'abc', expected a whole number"),
        ("!!float abc", "found 'abc', expected a number"),
        ("!!bool abc", "found 'abc', expected true or false"),
        ("!!timestamp abc", "found the tag !!timestamp, expected text"),
        ("!!python/object/apply:os.system [x]", "found the tag"),
        ("!!set {a}", "found the tag !!set"),
        ("9" * 5000, "found a whole number of 5,000 digits"),
        ("0x" + "f" * 5000, "found a whole number of 5,002 digits"),
        ("1e999", "found '1e999', which is too large"),
        ("? [a]\n: 1", "unhashable key"),
        ("&a [*a]", "part of itself"),
        ("[" * 5000, "nested too deeply; expected 50 levels at most"),
        ("{a: " * 5000, "nested too deeply"),
        ("".join(" " * i + "k:\n" for i in range(100)), "nested too deeply"),
        ("a: \0", "the character '\\x00' is not allowed"),
    ],
)
def test_what_is_not_read_is_refused_with_a_reason(text: str, words: str):
    with pytest.raises(YamlError) as caught:
        load_yaml(text)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("first", "node"),
    [("[x]", "[{}]"), ("{x: 1}", "{{{}}}"), ("{x: 1}", "{{<<: [{}]}}")],
    ids=["lists", "maps", "merges"],
)
def test_a_small_file_of_very_many_values_is_refused_before_they_are_made(first: str, node: str):
    lines = [f"v0: &v0 {first}"]
    for i in range(12):
        keys = ["" if "[" in node else f"k{j}: " for j in range(9)]
        lines.append(f"v{i + 1}: &v{i + 1} " + node.format(", ".join(f"{key}*v{i}" for key in keys)))
    with pytest.raises(YamlError, match="too many values, with all aliases written out"):
        load_yaml("\n".join(lines))


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    values
    | st.sampled_from(["1e3", "010", "1:30", "0o7", "yes", "<<", "~", "null", ".inf", "2020-01-01", ""])
)
def test_what_is_written_is_read_as_the_same(value: object):
    assert repr(load_yaml(dump_yaml(value))) == repr(value)
