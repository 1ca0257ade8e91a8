"""What players, and pairs of them, contribute to what their sets reach: a game, query by query.

With v the value of a set of players and N all of them, player i contributes v(i) - v(none) `alone`
and v(N) - v(N without i) when `withheld`. The `Shapley value` is the mean, over all orders in which
the players may come in, of what i adds (Shapley 1953); the values sum to the gain v(N) - v(none).
The `Shapley interaction` of i and j is v(S+i+j) - v(S+i) - v(S+j) + v(S), averaged over sets S of
others with weights |S|! (|N|-|S|-2)! / (|N|-1)! (Grabisch and Roubens 1999): above 0 they need each
other, below 0 either can stand in for the other.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import TypeVar

import numpy as np
import pandas as pd
from jaxtyping import Float

from mechtv.evaluation.intervals import intervals_of_means, intervals_of_ratios

Player = TypeVar("Player", bound=str)


def coalitions(players: Sequence[Player]) -> tuple[tuple[Player, ...], ...]:
    """All sets of players, from none to all; in each the players have their own order."""
    return tuple(some for size in range(len(players) + 1) for some in combinations(players, size))


def contributions(
    players: Sequence[str], values: Float[np.ndarray, "coalition query"]
) -> pd.DataFrame:
    """What each player, and each pair, contributes to the mean over queries.

    Args:
        values: of each of `coalitions(players)`.

    Returns:
        One row an effect of a `player` (`with` another, or an empty string): its value, and its
        share of the gain, both with 95 % intervals by bootstrap over queries. A gain of 0 has no
        shares; if its interval contains 0 they have no intervals (NaN).
    """
    weights = dict(_weights(players))
    effects, gain = np.stack(list(weights.values())) @ values, values[-1] - values[0]
    mean, total = effects.mean(axis=1), gain.mean()
    low, high = intervals_of_means(effects)
    share_low, share_high = intervals_of_ratios(effects, gain)
    return pd.DataFrame(
        {
            "effect": [kind for kind, *_ in weights],
            "player": [who for _, who, *_ in weights],
            "with": ["".join(other) for _, _, *other in weights],
            "value": mean,
            "low": low,
            "high": high,
            "share": mean / total if total else np.full(len(mean), np.nan),
            "share_low": share_low,
            "share_high": share_high,
            "n": len(gain),
        }
    )


def _weights(
    players: Sequence[str],
) -> Iterator[tuple[tuple[str, ...], Float[np.ndarray, " coalition"]]]:
    """Each effect and whose it is, as weights of the coalitions."""
    n = len(players)
    for one in players:
        yield ("alone", one), _difference(players, [one], lambda size: float(size == 0))
        yield ("withheld", one), _difference(players, [one], lambda size: float(size == n - 1))
        yield ("Shapley value", one), _difference(players, [one], lambda s: _shapley(n, s, 1))
    for pair in combinations(players, 2):
        yield (
            ("Shapley interaction", *pair),
            _difference(players, pair, lambda s: _shapley(n, s, 2)),
        )


def _difference(
    players: Sequence[str], who: Sequence[str], weight: Callable[[int], float]
) -> Float[np.ndarray, " coalition"]:
    """What adding one player changes (of two: their second difference), as weights of coalitions.

    Args:
        weight: of a set of others, by its size.
    """
    place = {frozenset(some): number for number, some in enumerate(coalitions(players))}
    row = np.zeros(len(place))
    for rest in place:
        if rest.isdisjoint(who):
            for some in coalitions(who):
                sign = (-1) ** (len(who) - len(some))
                row[place[rest.union(some)]] += sign * weight(len(rest))
    return row


def _shapley(n: int, size: int, together: int) -> float:
    """|S|! (|N| - |S| - t)! / (|N| - t + 1)! for t players together."""
    orders = math.factorial(size) * math.factorial(n - size - together)
    return orders / math.factorial(n - together + 1)
