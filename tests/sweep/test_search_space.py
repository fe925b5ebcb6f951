"""The rules of a search, and sweeps as text."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.core.errors import InputError
from plait.sweeping.scheduler import TrialScheduler
from plait.sweeping.search.pruning import best_first, exploit, goes_on, rungs, survivors
from plait.sweeping.search.space import Dimension, combinations, parse_dimension
from support.sweeping import sweep_of

results = st.dictionaries(st.integers(0, 50), st.floats(allow_nan=True, allow_infinity=True), min_size=1)


@given(results, st.integers(2, 5))
def test_survivors_are_never_worse_than_those_who_leave(found, eta):
    kept = survivors(found, eta)
    assert len(kept) == max(1, len(found) // eta)
    left = [found[trial] for trial in found if trial not in kept]
    for trial in kept:
        assert all(math.isnan(other) or found[trial] <= other for other in left)


def test_what_is_not_a_number_is_worst():
    assert best_first({0: math.nan, 1: math.inf, 2: 1.0}) == [2, 1, 0]


def test_rungs_grow_by_eta_up_to_the_end():
    assert rungs(1, 27, 3) == [1, 3, 9, 27]
    assert rungs(2, 20, 3) == [2, 6, 18, 20]
    assert rungs(5, 5, 2) == [5]
    with pytest.raises(InputError, match="least 9 and most 3"):
        rungs(9, 3)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=60), st.integers(2, 4))
def test_asha_lets_about_one_in_eta_go_on_whoever_comes_first(values, eta):
    reached: list[float] = []
    going = []
    for value in values:
        if goes_on(value, reached, eta):
            going.append(value)
        reached.append(value)
    assert going[0] == values[0]
    assert min(values) in going
    assert not goes_on(math.nan, reached, eta)


def test_asha_keeps_one_in_eta_rounded_down():
    # Of four results one goes on; the second best of them does not.
    assert not goes_on(2.0, [1.0, 3.0, 4.0], 3)
    assert goes_on(2.0, [1.0, 3.0, 4.0, 5.0, 6.0], 3)


@given(st.dictionaries(st.integers(0, 30), st.floats(0, 1), min_size=2), st.integers(0, 5))
def test_losers_copy_winners_and_never_the_other_way(found, seed):
    copies = exploit(found, ["lr"], seed)
    assert copies == exploit(found, ["lr"], seed)
    assert copies
    for copy in copies:
        assert found[copy.winner] <= found[copy.loser]
        assert copy.winner != copy.loser
        assert copy.factors["lr"] in (0.8, 1.25)
    assert {copy.winner for copy in copies}.isdisjoint(copy.loser for copy in copies)


def test_over_reads_lists_and_ranges():
    decay, kind = "optimizer.weight_decay", "optimizer.kind"
    assert parse_dimension(f"{decay}=0,1e-4") == Dimension(decay, (0, 1e-4))
    assert parse_dimension(f"{kind}=sgd,adam") == Dimension(kind, ("sgd", "adam"))
    assert parse_dimension("optimizer.lr=log:1e-4:1e-1:4").values == pytest.approx((1e-4, 1e-3, 1e-2, 1e-1))
    assert parse_dimension("x=linear:0:1:3").values == (0.0, 0.5, 1.0)
    assert parse_dimension('data.path="a,b.txt",c.txt,["d,]",1]').values == ("a,b.txt", "c.txt", ["d,]", 1])


def test_a_grid_holds_every_combination_once():
    trials = combinations([parse_dimension("a=1,2"), parse_dimension("b=x,y,z")])
    assert len(trials) == 6
    assert {(t["a"], t["b"]) for t in trials} == {(a, b) for a in (1, 2) for b in "xyz"}


@pytest.mark.parametrize("text", ["lr", "lr=", "lr=log:0:1:4", "lr=linear:0:1:1", "=1"])
def test_a_malformed_range_is_refused_with_the_form(text):
    with pytest.raises(InputError, match="--over"):
        parse_dimension(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("k=int:1:5:nan", "expected a count of 2 to 10,000"),
        ("k=int:1:5:inf", "expected a count of 2 to 10,000"),
        ("k=linear:1:5:1e9", "expected a count of 2 to 10,000"),
        ("k=int:1:1e300:4", "expected whole numbers after int:, 2\\*\\*53 at most"),
        ("k=linear:-1.7e308:1.7e308:3", "expected low < high, and finite numbers"),
        ("k=log:nan:1:3", "expected 0 < low < high"),
        ("k=" + "[" * 5000, "--over k: found '\\[\\[.*expected a value to try"),
        ("k=" + "1" * 5000, "--over k: found '111.*expected a value to try"),
        ("k=" + "1," * 200_000, "found 200,001 values, expected 10,000 at most"),
    ],
)
def test_a_range_without_end_or_of_no_numbers_is_refused(text: str, words: str):
    with pytest.raises(InputError, match=words) as caught:
        parse_dimension(text)
    assert len(str(caught.value)) < 400


def test_a_grid_of_too_many_combinations_is_refused_before_it_is_made():
    over = [f"{key}=" + ",".join(map(str, range(100))) for key in "abcd"]
    with pytest.raises(InputError, match="found 100,000,000 combinations, expected 10,000 at most"):
        combinations([parse_dimension(text) for text in over])


def test_a_key_given_twice_is_refused():
    with pytest.raises(InputError, match="lr is given twice"):
        combinations([parse_dimension("lr=1"), parse_dimension("lr=2")])


def test_of_very_many_values_a_few_are_checked_and_what_cannot_stand_for_others_is_limited():
    numbers = (*range(5000), 0.5, 1e-3, "auto", None)
    assert Dimension("k", numbers).samples() == ("auto", None, 0, 4999, 1e-3, 0.5)
    assert Dimension("k", numbers[:100]).samples() == numbers[:100]
    with pytest.raises(InputError, match="--over k: found 3,000 values that are no numbers, such as 'a0'"):
        Dimension("k", tuple(f"a{number}" for number in range(3000))).samples()


def test_the_trials_of_a_large_grid_are_drawn_without_a_look_at_all_others(monkeypatch: pytest.MonkeyPatch):
    """Each made a model, and was compared with all before it."""
    made: list[int] = []
    monkeypatch.setattr("support.training.small_net", lambda: made.append(1) or torch.nn.Linear(2, 2))
    settings = sweep_of("optimizer.lr=linear:0.001:0.1:300")
    looked: list[int] = []
    monkeypatch.setattr("plait.sweeping.scheduler.Past", lambda *_: looked.append(1))
    scheduler = TrialScheduler(settings, 1, "loss", lambda _: 4, lambda _: None, lambda *_: None)
    scheduler.open()
    assert (len(scheduler.trials), len({trial.group for trial in scheduler.trials})) == (300, 1)
    assert (len(made) <= 1, looked) == (True, [])


def test_whole_numbers_can_be_spaced_and_drawn_by_their_logarithm():
    assert parse_dimension("a=logint:4:64:5").values == (4, 8, 16, 32, 64)
    drawn = [parse_dimension("a=logint:1:100").at(share / 1000) for share in range(1000)]
    assert {type(value) for value in drawn} == {int}
    assert (min(drawn), max(drawn)) == (1, 100)
    # As many below ten as above.
    assert 0.4 < sum(value < 10 for value in drawn) / 1000 < 0.6
    with pytest.raises(InputError, match="0 < low < high"):
        parse_dimension("a=logint:0:8")


@pytest.mark.parametrize("text", ["a=loguniform:1e-4:1e-1", "a=ints:4:64:5", "a=Log:1:2"])
def test_a_kind_of_range_that_there_is_not_is_no_text(text):
    with pytest.raises(InputError, match="expected key=v1,v2.*there is no"):
        parse_dimension(text)
    # Names of functions are text, and so is what has too few or too many numbers.
    assert parse_dimension("loss=mine:mae").values == ("mine:mae",)
    assert parse_dimension("time=at:12").values == ("at:12",)
