"""What the commands share: their options as values, and their results as files and lines.

Heavy imports stand inside the functions, so that `--help` is quick.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mechtv.tasks import Task
    from mechtv.vectors import TaskVector


def opened_model(model: str, device: str | None, dtype: str) -> Any:
    """The model that an option names."""
    from mechtv.errors import UnknownName
    from mechtv.models import DTYPES, open_model

    if dtype not in DTYPES:
        raise UnknownName("data type", dtype, DTYPES)
    return open_model(model, device=device, dtype=DTYPES[dtype])


def task_named(name: str, template: str | None) -> "Task":
    """A task by name or file, perhaps under another template."""
    from mechtv.tasks import get_task

    task = get_task(name)
    return task if template is None else task.with_template(template.replace("\\n", "\n"))


def at_home(
    vector: "TaskVector | None",
    model: str | None,
    task: str | None,
    template: str | None,
    device: str | None,
    dtype: str,
) -> "tuple[Any, Task]":
    """The model and the task that options name; what is left out is what the vector's card says."""
    card = None if vector is None else vector.card
    of_card = card is not None and task in (None, card.task)
    chosen = task_named(
        task or (card.task if card else "present-past"),
        template or (card.template if card and of_card else None),
    )
    return opened_model(model or (card.model if card else "smollm2-135m"), device, dtype), chosen


def numbers(text: str | None) -> tuple[int, ...] | None:
    """A list of numbers such as 4,11,19; None if it was left out."""
    from mechtv.errors import InvalidInput

    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidInput(f"{text!r} is not a list of numbers; write them like 4,11,19.") from None


def names_in(text: str | None) -> list[str] | None:
    """A list of names such as readers,heads; None if it was left out."""
    return None if text is None else [name.strip() for name in text.split(",")]


def options_of(given: list[str] | None) -> dict[str, Any]:
    """`name=value` texts; values are JSON where they can be read so, else text."""
    import json

    from mechtv.errors import InvalidInput

    options = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise InvalidInput(f"{text!r} is no option; write it like shots=5.")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def options_by_method(given: list[str] | None) -> dict[str, dict[str, Any]]:
    """`method.name=value` texts, apart by method."""
    from mechtv.errors import InvalidInput

    by_method: dict[str, dict[str, Any]] = {}
    for text, value in options_of(given).items():
        method, dot, name = text.partition(".")
        if not dot:
            raise InvalidInput(f"{text!r} names no method; write it like learned.epochs=5.")
        by_method.setdefault(method, {})[name] = value
    return by_method


def line_of(rows: list[dict[str, Any]]) -> str:
    """One finished cell, for the terminal."""
    first = rows[0]
    where = "" if first["layer"] is None else f", layer {first['layer']}"
    scores = [r for r in rows if r["split"] == "test" and r["score"].startswith(("acc", "dNTP"))]
    values = "; ".join(f"{row['score']} {row['value']:.3f}" for row in scores)
    return f"{first['task']}: {first['method']}{where}: {values}"


def check_folder(path: Path) -> None:
    """Refuse a file whose folder does not exist, before anything runs."""
    from mechtv.errors import InvalidInput

    if not path.resolve().parent.is_dir():
        raise InvalidInput(f"There is no folder {str(path.parent)!r}; make it first.")


def write_table(table: Any, path: Path) -> None:
    """A table as CSV, whole or not there."""
    write_text(table.to_csv(index=False), path)


def write_text(text: str, path: Path) -> None:
    """A text, whole or not there."""
    from mechtv.files import write_whole

    write_whole(path, text.encode())
