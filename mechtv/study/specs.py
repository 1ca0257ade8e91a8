"""What a study's models, tasks and methods are: plain values that travel and are written down.

Each can be opened on any machine that has the same files or reaches the same hub. Use them in a
`Study`; to score one opened model use `compare_methods`.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoConfig, AutoModelForCausalLM

from mechtv.errors import InvalidInput, UnknownName
from mechtv.methods.registry import METHODS, check_options, takes
from mechtv.models import DTYPES, open_model
from mechtv.models.cache import file_sha256
from mechtv.models.card import UNKNOWN
from mechtv.models.place import find, readable
from mechtv.study.scoring import REFERENCES
from mechtv.tasks import Task, get_task

MODEL_FILES = {".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".py"}
"""What a folder's model is made of: configuration, weights, tokenizer, code."""

Spec = TypeVar("Spec", "ModelSpec", "TaskSpec", "MethodSpec")
Stamp = tuple[tuple[str, int, int], ...]
"""Names, sizes and times of files: what was read from them is read again when they change."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model as `open_model` takes it.

    Args:
        name: a bundled name, a hub id, a local folder or a GGUF file.
        device: None leaves the choice to the worker: its own GPU, or else the CPU.
        device_map: placement of one model over several devices, as in `transformers`.

    Raises:
        UnknownName: for a data type that there is not.
    """

    name: str
    dtype: str = "float32"
    device: str | None = None
    device_map: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        _check_types(self)
        if self.dtype not in DTYPES:
            raise UnknownName("data type", self.dtype, DTYPES)

    def open(self, device: str | None = None) -> TransformerBridge:
        """The model.

        Args:
            device: where it goes if the spec says nothing.
        """
        placed = self.device or (None if self.device_map else device)
        return open_model(
            self.name,
            dtype=DTYPES[self.dtype],
            device=placed,
            device_map=self.device_map,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
        )

    def identity(self) -> dict[str, str]:
        """What tells its weights from others', without loading them.

        Raises:
            InvalidInput, UnknownName: if there is no such model.
        """
        revision = _revision(self, self.stamp())
        return {"name": self.name, "revision": revision, "dtype": self.dtype}

    def stamp(self) -> Stamp:
        """Of its files, if its name is a path."""
        return _stamp(self.name)

    def n_layers(self) -> int:
        """How many blocks it has, by its configuration.

        Raises:
            InvalidInput, UnknownName: if there is no such model.
        """
        return int(_config(self, self.stamp()).get_text_config().num_hidden_layers)

    def n_parameters(self) -> int:
        """How many parameters it has, by its configuration."""
        return _n_parameters(self, self.stamp())

    def nbytes(self) -> int:
        """How much memory its weights take."""
        return self.n_parameters() * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """A task as `get_task` takes it, perhaps under another template."""

    name: str
    data: str | None = None
    template: str | None = None

    def __post_init__(self) -> None:
        _check_types(self)

    def load(self) -> Task:
        """The task.

        Raises:
            InvalidInput, UnknownName: if there is no such task, template or file.
        """
        return _loaded(self, _stamp(self.data or self.name))


@dataclass(frozen=True, kw_only=True)
class MethodSpec:
    """A method of the registry with its options, or `zero-shot` or `in-context`.

    Args:
        label: what it is called in tables, to tell variants apart; the method's name if None.

    Raises:
        UnknownName: for a method or an option that there is not.
    """

    name: str
    label: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_types(self)
        if not isinstance(self.options, Mapping):
            raise InvalidInput(
                f"options={self.options!r} of {self.name!r} is no table of an option's names and "
                "values."
            )
        if self.name in REFERENCES:
            if self.options:
                raise InvalidInput(
                    f"{self.name!r} has no options; its shots are the study's: leave out "
                    f"{', '.join(self.options)}."
                )
        elif self.name not in METHODS:
            raise UnknownName("method", self.name, (*METHODS, *REFERENCES))
        else:
            check_options(self.name, self.options)

    @property
    def title(self) -> str:
        """Its name in tables."""
        return self.label or self.name

    @property
    def takes_positions(self) -> bool:
        """Whether it can be told where to write."""
        return self.name not in REFERENCES and takes(self.name, "positions")


def spec_of(kind: type[Spec], given: "str | Mapping[str, Any] | Spec", extra: str = "") -> Spec:
    """A spec from a name, a table of its fields, or itself.

    Args:
        extra: the field that takes what is no field; without it that is refused.

    Raises:
        InvalidInput, UnknownName: for what is none.
    """
    if isinstance(given, kind):
        return given
    if isinstance(given, str):
        return kind(name=given)
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise InvalidInput(
            f"{given!r} is neither a name nor a table with a name; write it like "
            '"present-past" or {name = "present-past", template = "qa"}.'
        )
    known = {entry.name for entry in fields(kind)}
    own = {name: value for name, value in given.items() if name in known}
    rest = {name: value for name, value in given.items() if name not in known}
    if rest and not extra:
        raise UnknownName(f"entry of {kind.__name__}", next(iter(rest)), known)
    if rest:
        own[extra] = {**own.get(extra, {}), **rest}
    return kind(**own)


def plain(spec: "ModelSpec | TaskSpec | MethodSpec") -> dict[str, Any]:
    """Its fields, but for those at their defaults."""
    return {
        name: value
        for name, value in asdict(spec).items()
        if name == "name" or value not in (None, False, {}, "float32")
    }


def _check_types(spec: Any) -> None:
    """Refuse what is no text where one is due, and no truth value where one is."""
    for entry in fields(spec):
        value: Any = getattr(spec, entry.name)
        kind: Any = entry.type
        if entry.name != "options" and not isinstance(value, kind):
            wanted = "true or false" if kind is bool else "a text"
            raise InvalidInput(
                f"{entry.name}={value!r} of a {type(spec).__name__} is not {wanted}; give one."
            )


@lru_cache(maxsize=256)
def _loaded(spec: TaskSpec, stamp: Stamp) -> Task:
    task = get_task(spec.name, data=spec.data)
    return task if spec.template is None else task.with_template(spec.template)


@lru_cache(maxsize=256)
def _revision(spec: ModelSpec, stamp: Stamp) -> str:
    place = find(spec.name, spec.revision)
    return _folder_checksum(Path(place.path)) if place.revision == UNKNOWN else place.revision


@lru_cache(maxsize=256)
def _config(spec: ModelSpec, stamp: Stamp) -> Any:
    place = find(spec.name, spec.revision)
    with readable(spec.name):
        return AutoConfig.from_pretrained(
            place.path,
            revision=place.hub_revision,
            trust_remote_code=spec.trust_remote_code,
        )


@lru_cache(maxsize=256)
def _n_parameters(spec: ModelSpec, stamp: Stamp) -> int:
    with torch.device("meta"), readable(spec.name):  # shapes alone, no memory
        model = AutoModelForCausalLM.from_config(
            _config(spec, stamp), trust_remote_code=spec.trust_remote_code
        )
    return int(model.num_parameters())


def _stamp(name: str) -> Stamp:
    """Of a file, or of the files in a folder; empty for a name that is no path."""
    path = Path(name).expanduser()
    if not path.exists():
        return ()
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.is_file())
    found = [(file, file.stat()) for file in files]
    return tuple((file.name, about.st_size, about.st_mtime_ns) for file, about in found)


def _folder_checksum(folder: Path) -> str:
    """Of all that a model in a local folder is made of."""
    files = sorted(file for file in folder.iterdir() if file.suffix in MODEL_FILES)
    parts = [f"{file.name} {file_sha256(file)}" for file in files if file.is_file()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
