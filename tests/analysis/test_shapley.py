"""Contributions of players in games whose answers are known."""

import numpy as np
import pytest

from mechtv.analysis.shapley import coalitions, contributions


def played(players, value):
    """Two queries: one at the value, one at three times it."""
    values = np.array([[value(set(some)), 3 * value(set(some))] for some in coalitions(players)])
    found = contributions(players, values.astype(float))
    return found.set_index(["effect", "player", "with"]).sort_index()


def test_coalitions_go_from_none_to_all() -> None:
    assert coalitions(("a", "b")) == ((), ("a",), ("b",), ("a", "b"))
    assert len(set(coalitions("abcde"))) == 32
    assert coalitions(()) == ((),)


def test_the_glove_game() -> None:
    """One left and two right gloves; only a pair is worth anything (Shapley: 2/3, 1/6, 1/6)."""
    players = ("left", "right", "other right")
    found = played(players, lambda some: "left" in some and len(some) > 1)
    gain = 2  # of the two queries: 1 and 3
    shapley = found.loc["Shapley value"].droplevel("with")
    assert shapley["share"].to_dict() == pytest.approx(
        {"left": 2 / 3, "right": 1 / 6, "other right": 1 / 6}
    )
    assert shapley["value"].tolist() == pytest.approx((shapley["share"] * gain).tolist())
    assert found.loc["alone", "value"].tolist() == [0, 0, 0]
    assert found.loc["withheld", "value"].tolist() == [gain, 0, 0]
    pairs = found.loc["Shapley interaction", "value"]
    assert pairs["left", "right"] == pytest.approx(gain / 2)
    assert pairs["right", "other right"] == pytest.approx(-gain / 2)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_players_that_need_all_share_alike(n: int) -> None:
    players = tuple("abcde"[:n])
    found = played(players, lambda some: len(some) == n)
    assert found.loc["Shapley value", "share"].tolist() == pytest.approx([1 / n] * n)
    assert found.loc["withheld", "share"].tolist() == pytest.approx([1] * n)
    if n > 1:
        assert len(found.loc["Shapley interaction"]) == n * (n - 1) / 2
        assert found.loc["Shapley interaction", "share"].tolist() == pytest.approx(
            [1 / (n - 1)] * (n * (n - 1) // 2)
        )
    assert (found["n"] == 2).all()


def test_a_player_that_adds_the_same_to_all_has_that_value_and_no_interaction() -> None:
    worth = {"a": 1.0, "b": -2.0, "c": 4.0}
    found = played(tuple(worth), lambda some: 7 + sum(worth[one] for one in some))
    for effect in ("alone", "withheld", "Shapley value"):
        values = found.loc[effect, "value"].droplevel("with").to_dict()
        assert values == pytest.approx({one: 2 * value for one, value in worth.items()})
    assert found.loc["Shapley interaction", "value"].tolist() == pytest.approx([0, 0, 0])


def test_a_gain_of_nothing_has_no_shares() -> None:
    found = played(("a", "b"), lambda some: len(some) == 1)
    assert found[["share", "share_low", "share_high"]].isna().all(axis=None)
    assert found.loc["Shapley interaction", "value"].item() == pytest.approx(-4)
