"""A Griffe extension: Args and Attributes that name several things at once ("a, b: text").

Each is checked against the signature as if it had an entry of its own; the page shows one entry.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from griffe import Extension, Object

SEVERAL = re.compile(r"^( +)([a-z]\w*(?:, [a-z]\w*)+):(?=\s)", re.MULTILINE)
SAME = "(same)"


class SeveralNames(Extension):
    """Such entries in every docstring of the package."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Read the docstring with one entry a name, then join what belongs together."""
        if obj.docstring is not None:
            obj.docstring.value = SEVERAL.sub(_one_each, obj.docstring.value)
            for section in obj.docstring.parsed:
                if section.kind.value in ("parameters", "attributes"):
                    section.value[:] = _joined(section.value)


def _one_each(found: re.Match[str]) -> str:
    indent, names = found.groups()
    return f": {SAME}\n".join(f"{indent}{name}" for name in names.split(", ")) + ":"


def _joined(entries: Iterable[Any]) -> Iterator[Any]:
    waiting: list[Any] = []
    for entry in entries:
        waiting.append(entry)
        if entry.description != SAME:
            entry.name = ", ".join(one.name for one in waiting)
            for what in ("annotation", "value"):  # said where it is that of all
                if len({str(getattr(one, what)) for one in waiting}) > 1:
                    setattr(entry, what, None)
            waiting = []
            yield entry
