"""One example of a task: named input texts and the answer."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Example:
    """`fields` are the inputs by name (`{"input": "jump"}`), `answer` the text to produce."""

    fields: Mapping[str, str]
    answer: str

    @property
    def key(self) -> tuple[str, ...]:
        """What makes two examples the same query: their inputs."""
        return tuple(self.fields[name] for name in sorted(self.fields))

    @classmethod
    def pair(cls, text: str, answer: str) -> "Example":
        """An example with the single field `input`."""
        return cls(fields={"input": text}, answer=answer)
