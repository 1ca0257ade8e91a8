"""Errors whose one sentence says what was given, what is allowed, and how to fix it.

Every error that a user can cause derives from `MechtvError` and from the built-in error that fits,
so `except ValueError` and `except KeyError` work as anyone would expect.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class MechtvError(Exception):
    """The base of every error that mechtv raises on purpose."""


class InvalidInput(MechtvError, ValueError):
    """A value that cannot be used, with the values that can."""


class CannotWrite(InvalidInput):
    """A file that cannot be written, and why; what was written before it is safe."""


class Interrupted(MechtvError, RuntimeError):
    """Long work that cannot go on; what was finished is kept, and how to go on is said."""


class UnknownName(MechtvError, KeyError):
    """A name that is in no registry, with the names closest to it."""

    def __init__(self, kind: str, given: str, known: Iterable[str], hint: str = "") -> None:
        names = sorted(known)
        self.parts = (kind, given, tuple(names), hint)
        near = get_close_matches(given, names, n=3, cutoff=0.5)
        choices = (
            f"did you mean {' or '.join(map(repr, near))}?"
            if near
            else f"known: {', '.join(names)}."
        )
        self.sentence = f"There is no {kind} named {given!r}; {choices}{' ' + hint if hint else ''}"
        super().__init__(self.sentence)

    def __reduce__(self) -> tuple[type["UnknownName"], tuple[str, str, tuple[str, ...], str]]:
        return type(self), self.parts  # so that it can travel between processes

    def __str__(self) -> str:  # KeyError would show the sentence in quotes
        return self.sentence
