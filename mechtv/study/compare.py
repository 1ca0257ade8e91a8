"""Every method at several layers on several tasks: accuracies, dNTP, seconds, in one table.

Each (task, method, layer) is a cell; finished cells are kept in a folder and not computed again.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.evaluation.accuracy import evaluate
from mechtv.evaluation.scoring import Scorer
from mechtv.methods.layers import as_layers
from mechtv.methods.registry import METHODS, Method, check_options, method_named
from mechtv.overview import evenly_spread
from mechtv.progress import progress_bar
from mechtv.study.store import Key, Row, Store, key_of
from mechtv.tasks.task import Task
from mechtv.vectors.vector import TaskVector

REFERENCES = ("zero-shot", "in-context")
CHOOSES = {True: "accuracy, label-restricted", False: "accuracy, full vocabulary"}

Options = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, eq=False)
class MethodComparison:
    """What `compare_methods` found.

    Args:
        rows: one row a (task, method, layer, split, score): value, 95 % interval, n, and the
            seconds to fit and per query. Layer is missing where a method has none.
    """

    rows: pd.DataFrame

    @classmethod
    def of(cls, *parts: "MethodComparison") -> "MethodComparison":
        """Several comparisons as one.

        Raises:
            InvalidInput: if a cell stands in two of them, for instance of two seeds.
        """
        rows = pd.concat([part.rows for part in parts], ignore_index=True)
        twice = rows[rows.duplicated(["task", "method", "layer", "split", "score"])]
        if len(twice):
            raise InvalidInput(
                f"{twice['method'].iloc[0]!r} on {twice['task'].iloc[0]!r} stands in two of the "
                "comparisons; join those of different tasks or methods."
            )
        return cls(rows=rows)

    def table(self) -> pd.DataFrame:
        """The rows."""
        return self.rows

    def best(self) -> pd.DataFrame:
        """The test rows of each method's layer that is best on the validation split.

        Label-restricted accuracy decides for tasks with a closed label set, else full-vocabulary
        accuracy; the answer's log-probability decides between equals.
        """
        chosen = []
        for (_, _), own in self.rows.groupby(["task", "method"], sort=False):
            layers = own.loc[own["split"] == "validation", "layer"].drop_duplicates()
            best = max(layers, key=lambda layer: _rank(own, layer)) if len(layers) else None
            test = own[own["split"] == "test"]
            chosen.append(test if best is None or pd.isna(best) else test[test["layer"] == best])
        table: pd.DataFrame = pd.concat(chosen, ignore_index=True)
        return table

    def wide(self) -> pd.DataFrame:
        """One row a (task, method) at its best layer; a column a score, as text with interval."""
        best = self.best()
        best["text"] = [
            f"{row.value:.2f} [{row.low:.2f}, {row.high:.2f}]" for row in best.itertuples()
        ]
        index = ["task", "method", "layer", "n", "seconds_to_fit", "seconds_per_query"]
        filled = best.assign(layer=best["layer"].astype("Int64").astype(str))
        wide = filled.pivot(index=index, columns="score", values="text")
        order = best[["task", "method"]].drop_duplicates()
        return order.merge(wide.reset_index().rename_axis(columns=None), on=["task", "method"])


def compare_methods(
    model: TransformerBridge,
    tasks: Sequence[Task],
    methods: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    *,
    shots: int = 8,
    n: int | None = None,
    n_validation: int | None = None,
    options: Options | None = None,
    folder: str | None = None,
    seed: int = 0,
    progress: bool | None = None,
    on_finished: Callable[[list[Row]], None] | None = None,
) -> MethodComparison:
    """Make every method's vector at every layer and score it, beside zero-shot and in-context.

    Args:
        methods: names of `METHODS`; all if None.
        layers: four evenly spread ones if None.
        shots: demonstrations of the in-context run, from which dNTP is measured. What methods read
            is their own default unless `options` say otherwise.
        n, n_validation: how many test and validation queries; the whole splits if None or where
            they are smaller.
        options: for a method's name what it is called with, such as
            `{"linear": {"shots": 8}, "learned": {"epochs": 5}}`.
        folder: where finished cells and their vectors are kept; a second run with the same settings
            goes on from there. Nothing is kept if None.
        on_finished: called with each new cell's rows.

    Raises:
        InvalidInput: for an unknown method, options for a method that is not run, a task given
            twice, or what the methods themselves refuse.
    """
    names = list(METHODS) if methods is None else list(methods)
    options = options or {}
    _check(names, tasks, options)
    depths = as_layers(evenly_spread(model.cfg.n_layers) if layers is None else layers)
    store, rows = Store(folder), []
    total = len(tasks) * sum(len(_layers_of(name, depths)) for name in (*REFERENCES, *names))
    with progress_bar(title="cells", total=total, show=progress) as bar:
        for task in tasks:
            cells = _Cells(
                model, task, shots, n, n_validation, options, store, seed=seed, progress=progress
            )
            for name in (*REFERENCES, *names):
                for found, is_new in cells.of(name, _layers_of(name, depths)):
                    rows += found
                    bar.update()
                    if is_new and on_finished is not None:
                        on_finished(found)
    return MethodComparison(rows=pd.DataFrame(rows).astype({"layer": "Int64"}))


def _layers_of(name: str, depths: tuple[int, ...]) -> tuple[int | None, ...]:
    return depths if name not in REFERENCES and METHODS[name].has_layer else (None,)


class _Cells:
    """The cells of one task; prompts and costly parts are made when the first new cell asks."""

    def __init__(
        self,
        model: TransformerBridge,
        task: Task,
        shots: int,
        n: int | None,
        n_validation: int | None,
        options: Options,
        store: Store,
        *,
        seed: int,
        progress: bool | None,
    ) -> None:
        self.model, self.task = model, task
        splits = task.splits(seed)
        self._shots = shots
        self._n = len(splits.test) if n is None else min(n, len(splits.test))
        held = len(splits.validation)
        self._n_validation = held if n_validation is None else min(n_validation, held)
        self._options, self._store = options, store
        self._seed, self._progress = seed, progress
        self._made: Scorer | None = None

    def of(self, name: str, layers: Sequence[int | None]) -> Iterator[tuple[list[Row], bool]]:
        """Each layer's rows, and whether they are new."""
        make = None if name in REFERENCES else _Maker(self, method_named(name), name)
        for layer in layers:
            key = self._key(name, layer)
            rows = self._store.rows(key)
            is_new = rows is None
            if rows is None:
                vector, seconds = (None, 0.0) if make is None else make(layer)
                rows = self._scored(name, layer, vector, seconds)
                path = self._store.path(key, ".safetensors")
                if vector is not None and path is not None:
                    vector.save(path)
                self._store.keep(key, rows)
            yield rows, is_new

    def _scored(
        self, name: str, layer: int | None, vector: TaskVector | None, seconds: float
    ) -> list[Row]:
        scores = self._scorer.score(name, vector)
        tables = [scores.table()]
        if vector is not None and layer is not None:
            validation = evaluate(
                self.model,
                self.task,
                vector,
                split="validation",
                n=self._n_validation,
                seed=self._seed,
                progress=False,
            )
            tables.append(validation.table())
        about = {
            "method": name,
            "layer": layer,
            "parameters": 0 if vector is None else vector.n_parameters,
            "seconds_to_fit": round(seconds, 3),
            "seconds_per_query": round(scores.seconds_per_query, 5),
        }
        table = pd.concat(tables, ignore_index=True).drop(columns=["setting", "tokens"])
        table["split"] = table["split"].fillna("test")
        columns = ["task", "split", "score", "value", "low", "high", "n", "shots"]
        origin = ["model", "revision", "weights", "template", "seed"]
        return [
            {**{c: row[c] for c in columns}, **about, **{c: row[c] for c in origin}}
            for row in table.to_dict("records")
        ]

    def options_of(self, name: str) -> dict[str, Any]:
        """What a method is called with."""
        own = dict(self._options.get(name, {}))
        return {"seed": self._seed, "progress": self._progress} | own

    @property
    def _scorer(self) -> Scorer:
        if self._made is None:
            self._made = Scorer(
                self.model,
                self.task,
                shots=self._shots,
                n=self._n,
                seed=self._seed,
                progress=self._progress,
            )
        return self._made

    def _key(self, name: str, layer: int | None) -> Key:
        return key_of(
            self.model,
            self.task,
            method=name,
            layer=layer,
            shots=self._shots,
            n=self._n,
            n_validation=self._n_validation,
            options=dict(self._options.get(name, {})),
            seed=self._seed,
        )


class _Maker:
    """Makes one method's vectors; what its layers share is made once, and timed with each."""

    def __init__(self, cells: _Cells, method: Method, name: str) -> None:
        self._method, self._model, self._task = method, cells.model, cells.task
        self._options = cells.options_of(name)
        self._shared: dict[str, Any] | None = None
        self._shared_seconds = 0.0

    def __call__(self, layer: int | None) -> tuple[TaskVector, float]:
        """The vector of a layer, and how many seconds it takes by itself."""
        began = time.perf_counter()
        if self._shared is None:
            prepare = self._method.shared
            known = {} if prepare is None else prepare(self._model, self._task, **self._options)
            self._shared, self._shared_seconds = known, time.perf_counter() - began
            began = time.perf_counter()
        where = () if layer is None else (layer,)
        options = self._options | self._shared
        vector = self._method.make(self._model, self._task, *where, **options)
        return vector, self._shared_seconds + time.perf_counter() - began


def _rank(rows: pd.DataFrame, layer: Any) -> tuple[float, float]:
    own = rows[(rows["split"] == "validation") & (rows["layer"] == layer)].set_index("score")
    value = own["value"]
    return value[CHOOSES[CHOOSES[True] in own.index]], value["log-probability"]


def _check(names: Sequence[str], tasks: Sequence[Task], options: Options) -> None:
    for name in names:
        method_named(name)
    for name in options:
        check_options(name, options[name])
    strange = sorted(set(options) - set(names))
    if strange:
        raise InvalidInput(
            f"options are given for {', '.join(strange)}, which is not among the methods "
            f"{', '.join(names)}."
        )
    twice = sorted({task.name for task in tasks if [t.name for t in tasks].count(task.name) > 1})
    if not tasks or twice:
        raise InvalidInput(
            f"The tasks must be one or more with distinct names; {', '.join(twice) or 'none'} "
            f"{'stand twice' if twice else 'was given'}."
        )
