"""Where a vector came from: enough to make it again, and to refuse it where it does not belong."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from typing import Any

LIBRARIES = ("mechtv", "torch", "transformers", "transformer-lens")


def library_versions() -> dict[str, str]:
    """The versions of the libraries that a vector's numbers depend on."""
    return {name: _version(name) for name in LIBRARIES}


_version = cache(version)  # which reads a file


@dataclass(frozen=True, kw_only=True)
class Card:
    """The provenance of a task vector.

    Args:
        method: the method's name, e.g. `learned`.
        settings: every option the method ran with, defaults included (JSON values).
        model: the model's name; `model_revision` its commit or checksum; `weights` raw or
            processed.
        task: the task's name; `template` the template's
            description.
        seed: the seed of all its random choices.
        dtype: the data type of the model that made it.
        versions: library versions.
        sources: the cards of the vectors that this one was computed from.
        curve: one mapping a training evaluation, for methods that train.
    """

    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    model: str = "unknown"
    model_revision: str = "unknown"
    weights: str = "raw"
    task: str = "unknown"
    template: str = "unknown"
    seed: int | None = None
    dtype: str = "unknown"
    versions: Mapping[str, str] = field(default_factory=library_versions)
    sources: tuple["Card", ...] = ()
    curve: tuple[Mapping[str, float], ...] = ()

    def __post_init__(self) -> None:
        for name in ("settings", "curve"):  # in the form in which a file gives them back
            object.__setattr__(self, name, json.loads(json.dumps(getattr(self, name))))
        object.__setattr__(self, "curve", tuple(self.curve))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return plain | {
            "settings": dict(self.settings),
            "versions": dict(self.versions),
            "sources": [card.to_json() for card in self.sources],
            "curve": [dict(point) for point in self.curve],
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "Card":
        """The inverse of `to_json`."""
        nested = {
            "sources": tuple(cls.from_json(card) for card in plain.get("sources", ())),
            "curve": tuple(plain.get("curve", ())),
        }
        return cls(**{**plain, **nested})
