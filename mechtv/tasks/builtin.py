"""The tasks that ship with the package, one JSON file each in `mechtv/tasks/data`."""

import json
from functools import cache
from importlib.resources import files
from typing import Any

from mechtv.tasks.choice import delayed_reward
from mechtv.tasks.example import Example
from mechtv.tasks.task import Task, as_template

CHOICES = {"delayed-reward": "choice", "delayed-reward-open": "open-choice"}


@cache
def builtin_names() -> tuple[str, ...]:
    """The names of the built-in tasks, sorted."""
    names = {
        file.name.removesuffix(".json")
        for file in _folder().iterdir()
        if file.name.endswith(".json")
    }
    return tuple(sorted(names | set(CHOICES)))


def load_builtin(name: str) -> Task:
    """A built-in task by name."""
    if name in CHOICES:
        return delayed_reward(name, _read("delayed-reward"), template=CHOICES[name])
    plain = _read(name)
    labels = plain["labels"]
    return Task(
        name=name,
        description=plain["description"],
        labels=None if labels is None else tuple(labels),
        template=as_template(plain["template"]),
        examples=tuple(_example(plain["columns"], row) for row in plain["rows"]),
    )


def _folder() -> Any:
    return files("mechtv.tasks") / "data"


def _read(name: str) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads((_folder() / f"{name}.json").read_text(encoding="utf-8"))
    return plain


def _example(columns: list[str], row: list[str]) -> Example:
    *inputs, answer = row
    return Example(fields=dict(zip(columns[:-1], inputs, strict=True)), answer=answer)
