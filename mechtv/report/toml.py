"""A study as the text of a TOML file, which `Study.read` takes."""

import json
import re
from collections.abc import Mapping
from typing import Any

from mechtv.study.grid import Study

FIRST = ("name", "models", "tasks", "methods")


def toml(study: Study) -> str:
    """The text; an entry that is None is left out, since TOML has none."""
    entries = study.to_plain()
    order = sorted(entries, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    return "\n".join(f"{name} = {_entry(entries[name])}" for name in order)


def _entry(value: Any) -> str:
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        lines = "".join(f"    {_value(item)},\n" for item in value)
        return f"[\n{lines}]"
    return _value(value)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        if set(value) == {"name"}:
            return _value(value["name"])
        pairs = (f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None)
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else json.dumps(name)
