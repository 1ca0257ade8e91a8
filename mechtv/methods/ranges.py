"""Ranges that the settings of several methods share, each refused in one sentence."""

import math
from typing import Any, get_args

from mechtv.errors import InvalidInput


def check_choices(settings: object, **known: Any) -> None:
    """Refuse a field whose value is none of those of its `Literal` type."""
    for name, choices in known.items():
        value = getattr(settings, name)
        if value not in get_args(choices):
            raise InvalidInput(
                f"{name}={value!r} is unknown; use one of {', '.join(get_args(choices))}."
            )


def check_at_least(settings: object, least: int, *names: str) -> None:
    """Refuse a field whose number is below `least`."""
    for name in names:
        value = getattr(settings, name)
        if value < least:
            raise InvalidInput(f"{name}={value} is too small; use {least} or more.")


def check_positive(settings: object, name: str, hint: str) -> None:
    """Refuse a field that is 0, negative, or not finite."""
    value = getattr(settings, name)
    if not 0 < value < math.inf:
        raise InvalidInput(f"{name}={value} must be above 0 and finite; {hint}.")


def check_not_negative(settings: object, name: str, hint: str) -> None:
    """Refuse a field that is negative, or not finite."""
    value = getattr(settings, name)
    if not 0 <= value < math.inf:
        raise InvalidInput(f"{name}={value} must be 0 or more and finite; {hint}.")
