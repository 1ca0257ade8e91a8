"""Word pairs from a JSON file, in the forms of Todd et al. and of Hendel et al.

Todd: `[{"input": "hot", "output": "cold"}, ...]`. Hendel: `{"hot": "cold", ...}`. An answer may be
a list of alternatives, of which the first counts. For data with columns and integer labels, see
`text`.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from mechtv.errors import InvalidInput
from mechtv.tasks.example import Example
from mechtv.tasks.task import Task
from mechtv.tasks.template import TEMPLATES

logger = logging.getLogger(__name__)

FORMS = '[{"input": "hot", "output": "cold"}, ...] or {"hot": "cold", ...}'


def load_pairs(path: str | Path, labels: Sequence[str] | Literal["infer"] | None = None) -> Task:
    """A task from a JSON file of word pairs, named after the file, under the template `arrow`.

    Of a repeated input the first pair is kept; the number of the others is logged at INFO.

    Args:
        path: the file.
        labels: the closed label set; "infer" takes the distinct answers in order of appearance;
            None leaves the answers open.

    Raises:
        InvalidInput: if there is no such file, it is no JSON of either form, it holds no pairs or
            fewer than three, or its answers are not all among `labels`.
    """
    path = Path(path)
    if isinstance(labels, str) and labels != "infer":
        raise InvalidInput(
            f'labels={labels!r} is one text; give a list of labels, "infer" or None.'
        )
    pairs = list(_pairs(path, _read(path)))
    if not pairs:
        raise InvalidInput(f"{path} holds no pairs; expected {FORMS}.")
    examples = distinct(pairs, name=path.stem)
    if labels == "infer":
        labels = tuple(dict.fromkeys(example.answer for example in examples))
    return Task(
        name=path.stem,
        description=f"The pairs of {path.name}.",
        template=TEMPLATES["arrow"],
        labels=None if labels is None else tuple(labels),
        examples=examples,
        source=str(path),
    )


def distinct(
    examples: Iterable[Example], *, name: str, seen: set[tuple[str, ...]] | None = None
) -> tuple[Example, ...]:
    """The first example of each input that is not in `seen`; `seen` grows by them."""
    seen = set() if seen is None else seen
    kept: list[Example] = []
    repeated = 0
    for example in examples:
        if example.key in seen:
            repeated += 1
            continue
        seen.add(example.key)
        kept.append(example)
    _log_repeated(name, repeated)
    return tuple(kept)


def _log_repeated(name: str, repeated: int) -> None:
    if repeated:
        logger.info("%s: %d repeated inputs left out; the first of each is kept", name, repeated)


def _read(path: Path) -> Any:
    """The file's JSON; of a key that stands twice in an object the first value is kept."""
    if not path.is_file():
        raise InvalidInput(
            f"There is no file {str(path)!r}; give the path of a JSON file, {FORMS}."
        )

    def first_wins(items: list[tuple[str, Any]]) -> dict[str, Any]:
        plain: dict[str, Any] = {}
        for key, value in items:
            plain.setdefault(key, value)
        _log_repeated(path.stem, len(items) - len(plain))
        return plain

    try:
        return json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=first_wins)
    except ValueError as error:  # broken JSON, or bytes that are no UTF-8
        raise InvalidInput(f"{path} is not JSON ({error}); expected {FORMS}.") from error


def _pairs(path: Path, plain: Any) -> Iterator[Example]:
    if isinstance(plain, dict):
        for given, answer in plain.items():
            yield _example(f"{path}, input {given!r}", given, answer)
    elif isinstance(plain, list):
        for number, row in enumerate(plain, start=1):
            where = f"{path}, pair {number}"
            if not isinstance(row, dict) or not {"input", "output"} <= row.keys():
                raise InvalidInput(
                    f'{where}: found {_short(row)}, expected {{"input": ..., "output": ...}}.'
                )
            yield _example(where, row["input"], row["output"])
    else:
        raise InvalidInput(f"{path} holds {_short(plain)}; expected {FORMS}.")


def _example(where: str, given: Any, answer: Any) -> Example:
    first = answer[0] if isinstance(answer, list) and answer else answer
    for what, text in (("input", given), ("output", first)):
        if not isinstance(text, str) or not text.strip():
            raise InvalidInput(
                f"{where}: the {what} is {_short(text)}; expected a text"
                f"{' or a list of texts' if what == 'output' else ''} that is not empty."
            )
    return Example.pair(given.strip(), first.strip())


def _short(value: Any) -> str:
    shown = json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
