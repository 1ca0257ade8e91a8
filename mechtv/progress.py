"""One progress bar for all long work: on in a terminal or a notebook, off in scripts and tests."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tqdm.auto import tqdm

T = TypeVar("T")


def _interactive() -> bool:
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def progress(
    items: Iterable[T], *, title: str, show: bool | None = None, total: int | None = None
) -> Iterator[T]:
    """Iterate over `items` under a bar. `show=None` decides by where the output goes."""
    shown = _interactive() if show is None else show
    yield from tqdm(items, desc=title, disable=not shown, total=total, leave=False)


@contextmanager
def progress_bar(*, title: str, total: int, show: bool | None = None) -> Iterator[Any]:
    """A bar that the caller advances itself, for loops that may end early."""
    shown = _interactive() if show is None else show
    with tqdm(desc=title, total=total, disable=not shown, leave=False) as bar:
        yield bar
