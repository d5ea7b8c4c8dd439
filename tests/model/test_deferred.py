"""Entries made when somebody looks at them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ckpt_tools.model.deferred import Chosen, Deferred, Run


class Maker:
    """Two entries a name, and which names were asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, name: str) -> Iterator[str]:
        self.asked.append(name)
        yield f"{name}.0"
        yield f"{name}.1"


def run(maker: Maker, names: str) -> Run[str]:
    return Run(names, maker, 2 * len(names), lambda name: (name, name + "_v"))


def test_nothing_is_made_to_be_counted_and_everything_once() -> None:
    maker = Maker()
    made = Deferred(run(maker, "ab"), ("x",), Deferred(run(maker, "c")))
    assert len(made) == 7 and maker.asked == []
    every = ["a.0", "a.1", "b.0", "b.1", "x", "c.0", "c.1"]
    assert list(made) == every and list(made) == every and maker.asked == ["a", "b", "c"]
    assert made[1] == "a.1" and made[-2:] == ("c.0", "c.1") and maker.asked == ["a", "b", "c"]


def test_what_is_broken_off_is_made_again() -> None:
    maker = Maker()
    made = Deferred(run(maker, "ab"))
    assert next(iter(made)) == "a.0" and maker.asked == ["a"]
    assert made[2] == "b.0" and maker.asked == ["a", "a", "b"]


@pytest.mark.parametrize("complete", [False, True])
def test_a_share_is_made_of_its_own_names(complete: bool) -> None:
    maker = Maker()
    made = Deferred(Deferred(run(maker, "ab"), run(maker, "cd")), ("x",))
    if complete:
        list(made)
    maker.asked.clear()
    found = list(made.of({"b", "d_v"}))
    assert set(found) >= {"b.0", "b.1", "d.0", "d.1", "x"}
    if not complete:
        assert len(found) == 5 and maker.asked == ["b", "d"]


def test_an_error_is_raised_whenever_it_is_met() -> None:
    def broken(name: str) -> Iterator[str]:
        yield name
        raise ValueError(name)

    made = Deferred(Run("ab", broken, 2))
    for _ in range(2):
        with pytest.raises(ValueError, match="a"):
            list(made)


def test_chosen_entries_are_looked_for_up_to_the_first_to_know_whether_there_are_any() -> None:
    maker = Maker()
    made = Deferred(run(maker, "abc"))
    found = Chosen(made, lambda entry: entry in {"b.1", "c.0"})
    assert found and maker.asked == ["a", "b"]
    assert len(found) == 2 and list(found) == ["b.1", "c.0"] and found[0:1] == ("b.1",)
    assert not Chosen(made, lambda entry: entry == "z")
