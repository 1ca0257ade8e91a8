"""Find a task by name or by file: the one place that knows every source of tasks."""

from pathlib import Path

from mechtv.errors import InvalidInput, UnknownName
from mechtv.tasks.builtin import builtin_names, load_builtin
from mechtv.tasks.pairs import load_pairs
from mechtv.tasks.regression import REGRESSIONS, regression_task
from mechtv.tasks.sources import TEXT_SOURCES
from mechtv.tasks.task import Task
from mechtv.tasks.text import load_text


def get_task(name: str | Path, *, data: str | Path | None = None) -> Task:
    """A task by name, or from a file of word pairs.

    Args:
        name: a built-in task, `regression-linear` or `regression-relu` (see `regression_task`), a
            data set of the papers (through the `datasets` library), or the path of a JSON file:
            `[{"input": ..., "output": ...}]` or `{input: output}`.
        data: for a data set of the papers, a local file or folder with the same columns, used
            instead of the hub.

    Raises:
        UnknownName: with the nearest names, if there is no such task or file.
        InvalidInput: if a file cannot be read in its form.
    """
    if data is not None and str(name) not in TEXT_SOURCES:
        raise InvalidInput(
            f"data={str(data)!r} is only for the data sets of the papers, and {str(name)!r} is "
            f"none of them ({', '.join(TEXT_SOURCES)}); for a file of pairs give its path as "
            "the name."
        )
    if str(name) in TEXT_SOURCES:
        return load_text(str(name), data=data)
    if str(name) in builtin_names():
        return load_builtin(str(name))
    if str(name) in REGRESSIONS:
        return regression_task(REGRESSIONS[str(name)])
    if Path(name).is_file():
        return load_pairs(Path(name))
    raise UnknownName("task", str(name), list_tasks(), "The path of a JSON file also works.")


def list_tasks() -> tuple[str, ...]:
    """The names of all tasks: built-in ones, regressions, then the data sets of the papers."""
    return (*builtin_names(), *REGRESSIONS, *sorted(TEXT_SOURCES))
