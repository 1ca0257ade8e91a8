"""What the lists of a study may hold: read into plain numbers, or refused in one sentence."""

from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from mechtv.errors import InvalidInput


def listed(name: str, given: Any) -> list[Any]:
    """A list of any kind; a text or a table is none.

    Raises:
        InvalidInput: for what is none.
    """
    found = _list(given)
    if found is None:
        raise InvalidInput(f"{name}={given!r} is no list; write {name}=[{given!r}].")
    return found


def layers(given: Any) -> tuple[int | float, ...]:
    """Numbers of blocks, and fractions of the depth.

    Raises:
        InvalidInput: for anything else.
    """
    found = _list(given)
    if not found or not all(is_whole(one) or _is_fraction(one) for one in found):
        raise InvalidInput(
            f"layers={given!r} is none; give numbers of blocks, fractions from 0.0 to 1.0, or "
            '"all".'
        )
    return tuple(int(one) if is_whole(one) else float(one) for one in found)


def positions(given: Any) -> tuple[tuple[int, ...], ...]:
    """Lists of positions, each counted from the last token.

    Raises:
        InvalidInput: for anything else.
    """
    found = [_list(one) for one in _list(given) or [None]]
    if not found or not all(map(_are_positions, found)):
        raise InvalidInput(
            f"positions={given!r} is no list of lists of positions; count from the last token, "
            "which is -1: [[-1], [-3, -2, -1]]."
        )
    return tuple(whole("positions", some) for some in found)


def whole(name: str, given: Any) -> tuple[int, ...]:
    """Whole numbers.

    Raises:
        InvalidInput: for a list that holds anything else.
    """
    found = listed(name, given)
    for one in found:
        if not is_whole(one):
            raise InvalidInput(f"{name} holds {one!r}; give whole numbers.")
    return tuple(map(int, found))


def is_whole(one: Any) -> bool:
    """Whether it is a whole number, of whatever library."""
    return isinstance(one, Integral) and not isinstance(one, bool)


def _list(given: Any) -> list[Any] | None:
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        return None
    return list(given)


def _is_fraction(one: Any) -> bool:
    return isinstance(one, Real) and not isinstance(one, Integral) and 0 <= float(one) <= 1


def _are_positions(some: list[Any] | None) -> bool:
    return bool(some) and all(is_whole(one) and one < 0 for one in some or ())
