"""A study as a grid: models x tasks x methods x layers x positions x seeds, checked before it runs.

Described in Python or as a TOML file (`Study.read`). `mechtv.study.running` runs it.
"""

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Literal

from mechtv.errors import InvalidInput, UnknownName
from mechtv.methods.registry import METHODS
from mechtv.overview import evenly_spread
from mechtv.study.code import code_version
from mechtv.study.lists import is_whole, layers, listed, positions, whole
from mechtv.study.scoring import REFERENCES, at_most, layers_of
from mechtv.study.specs import MethodSpec, ModelSpec, TaskSpec, plain, spec_of
from mechtv.study.store import VERSIONS, Key, check_plain

Layers = Sequence[int | float] | Literal["all"] | None


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One (model, task, method, site, seed) of a study.

    Args:
        layer: None for what has none; `positions` None for what has its own.
    """

    model: ModelSpec
    task: TaskSpec
    method: MethodSpec
    layer: int | None
    positions: tuple[int, ...] | None
    seed: int

    def options(self) -> dict[str, Any]:
        """What its method is called with, but for the layer and the seed."""
        given = {} if self.positions is None else {"positions": list(self.positions)}
        return {**self.method.options, **given}

    def __str__(self) -> str:
        where = "" if self.layer is None else f", layer {self.layer}"
        at = "" if self.positions is None else f", positions {list(self.positions)}"
        about = f"{self.model.name}, {self.task.name}, {self.method.title}"
        return f"{about}{where}{at}, seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is to be computed; see `Study.check` for what is checked, and when.

    Args:
        models, tasks: names, or tables as in `ModelSpec` and `TaskSpec`.
        methods: names, or tables with a `name`, perhaps a `label`, and the method's options; all
            methods and both references if left out.
        layers: numbers of blocks; fractions of the depth (0.5 is the middle); "all"; four evenly
            spread ones if None. At each, every method that is for one layer.
        positions: for methods that can be told where to write, each of these lists of positions;
            their own default if None.
        shots: demonstrations of the in-context run, from which dNTP is measured.
        n, n_validation: how many test and validation queries; the whole splits if None or where
            they are smaller.

    Raises:
        InvalidInput, UnknownName: for what cannot be, as far as it shows without looking at models
            or data.
    """

    name: str
    models: Sequence[Any]
    tasks: Sequence[Any]
    methods: Sequence[Any] = (*REFERENCES, *METHODS)
    layers: Layers = None
    positions: Sequence[Sequence[int]] | None = None
    seeds: Sequence[int] = (0,)
    shots: int = 8
    n: int | None = None
    n_validation: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise InvalidInput(f"name={self.name!r} is no text; write it in quotes.")
        methods = [spec_of(MethodSpec, m, extra="options") for m in listed("methods", self.methods)]
        self._set("models", [spec_of(ModelSpec, one) for one in listed("models", self.models)])
        self._set("tasks", [spec_of(TaskSpec, one) for one in listed("tasks", self.tasks)])
        self._set("methods", methods)
        self._set("seeds", whole("seeds", listed("seeds", self.seeds)))
        for name in ("models", "tasks", "methods", "seeds"):
            values = list(getattr(self, name))
            if not values or any(value in values[:i] for i, value in enumerate(values)):
                what = "is empty" if not values else "names one of them twice"
                raise InvalidInput(f"{name} {what}; give one or more distinct {name}.")
        titles = [method.title for method in methods]
        if len(set(titles)) < len(titles):
            twice = next(title for title in titles if titles.count(title) > 1)
            raise InvalidInput(
                f"Two methods are called {twice!r}; give one of them a label of its own."
            )
        for name in ("shots", "n", "n_validation"):
            value = getattr(self, name)
            left_out = value is None and name != "shots"
            if not left_out and (not is_whole(value) or value < 1):
                raise InvalidInput(f"{name}={value!r} is no whole number of 1 or more.")
        if not (self.layers is None or _is_all(self.layers)):
            self._set("layers", layers(self.layers))
        if self.positions is not None:
            self._set("positions", positions(self.positions))

    def _set(self, name: str, values: Iterable[Any]) -> None:
        object.__setattr__(self, name, tuple(values))

    @classmethod
    def read(cls, path: str | Path) -> "Study":
        """A study from a TOML file, whose entries are the arguments of `Study`.

        Raises:
            InvalidInput, UnknownName: if there is no such file, it is no TOML, or an entry is none.
        """
        path = Path(path)
        try:
            found = tomllib.loads(path.read_text())
        except OSError as error:
            raise InvalidInput(f"{str(path)!r} cannot be read: {error.strerror}.") from error
        except ValueError as error:
            raise InvalidInput(f"{str(path)!r} is no TOML file: {error}.") from error
        return cls.from_plain({"name": path.stem, **found})

    @classmethod
    def from_plain(cls, found: Mapping[str, Any]) -> "Study":
        """The inverse of `to_plain`.

        Raises:
            InvalidInput, UnknownName: for an entry that is none, or one that is missing.
        """
        known = [entry.name for entry in fields(cls)]
        for name in found:
            if name not in known:
                raise UnknownName("entry of a study", name, known)
        missing = [name for name in ("name", "models", "tasks") if name not in found]
        if missing:
            raise InvalidInput(f"The study has no {' and no '.join(missing)}; add {missing[0]} =.")
        return cls(**found)

    def to_plain(self) -> dict[str, Any]:
        """Its entries as plain values, as a file holds them."""
        specs = {name: [plain(one) for one in getattr(self, name)] for name in _SPECS}
        others = {e.name: getattr(self, e.name) for e in fields(self) if e.name not in _SPECS}
        kept = {name: value for name, value in others.items() if value is not None}
        whole: dict[str, Any] = json.loads(json.dumps({**kept, **specs}))
        return whole

    def check(self) -> None:
        """Look for every model and task, and refuse what could not run: before anything does.

        Raises:
            InvalidInput, UnknownName: for a model or task that is not there, a layer that a model
                lacks, or more shots than a task's training split has.
        """
        for model in self.models:
            self.layers_of(model)
        for spec, seed in product(self.tasks, self.seeds):
            task = spec.load()
            there = len(task.splits(seed).train)
            if self.shots >= there:
                raise InvalidInput(
                    f"shots={self.shots} demonstrations were asked, but the training split of "
                    f"{task.name!r} holds {there}; ask for at most {there - 1}."
                )

    def layers_of(self, model: ModelSpec) -> tuple[int, ...]:
        """The study's layers in one model, in rising order.

        Raises:
            InvalidInput: if the model lacks one.
        """
        n_layers = model.n_layers()
        if self.layers is None:
            return evenly_spread(n_layers)
        if isinstance(self.layers, str):
            return tuple(range(n_layers))
        chosen = {_layer(one, n_layers) for one in self.layers}
        beyond = [layer for layer in chosen if not 0 <= layer < n_layers]
        if beyond:
            raise InvalidInput(
                f"Layer {beyond[0]} is none of {model.name!r}, which has {n_layers}: give 0 to "
                f"{n_layers - 1}, or fractions of the depth."
            )
        return tuple(sorted(chosen))

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """All cells, ordered so that neighbours share what they can: model, task, seed, method."""
        return tuple(
            Cell(model=model, task=task, seed=seed, method=method, positions=where, layer=layer)
            for model, task, seed in product(self.models, self.tasks, self.seeds)
            for method, where, layer in self._of(model)
        )

    def key(self, cell: Cell) -> Key:
        """What decides a cell's numbers."""
        task = cell.task.load()
        splits = task.splits(cell.seed)
        key = {
            "model": cell.model.identity(),
            "task": task.name,
            "task_checksum": task.checksum(),
            "method": cell.method.name,
            "layer": cell.layer,
            "options": cell.options(),
            "seed": cell.seed,
            "shots": self.shots,
            "n": at_most(self.n, len(splits.test)),
            "n_validation": at_most(self.n_validation, len(splits.validation)),
            VERSIONS: code_version(),
        }
        check_plain(key)
        return key

    def _of(
        self, model: ModelSpec
    ) -> Iterator[tuple[MethodSpec, tuple[int, ...] | None, int | None]]:
        for method in self.methods:
            every = self.positions if method.takes_positions and self.positions else [None]
            for where in every:
                for layer in layers_of(method.name, self.layers_of(model)):
                    yield method, None if where is None else tuple(where), layer


_SPECS = ("models", "tasks", "methods")


def _layer(given: int | float, n_layers: int) -> int:
    return given if isinstance(given, int) else min(round(given * n_layers), n_layers - 1)


def _is_all(layers: Any) -> bool:
    return isinstance(layers, str) and layers == "all"
