"""The cells of one model, task and seed: a method's vector at a layer, made and scored.

Prompts, the in-context run and a method's costly parts are made once, when the first cell asks.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from transformer_lens.model_bridge import TransformerBridge

from mechtv.evaluation.accuracy import evaluate
from mechtv.evaluation.scoring import Scorer
from mechtv.forward.setting import device_of
from mechtv.methods.registry import METHODS, Method, method_named
from mechtv.tasks.task import Task
from mechtv.vectors.vector import TaskVector

REFERENCES = ("zero-shot", "in-context")
"""What every method is compared with; they have no vector."""

Row = dict[str, Any]


def layers_of(name: str, layers: Sequence[int]) -> tuple[int | None, ...]:
    """The layers at which a method makes a vector: none by number if it writes to all at once."""
    return tuple(layers) if name not in REFERENCES and METHODS[name].has_layer else (None,)


class Bench:
    """Makes vectors of one model on one task and seed, and scores them on the same queries.

    Args:
        shots: demonstrations of the in-context run, from which dNTP is measured.
        n, n_validation: how many test and validation queries; the whole splits if None or where
            they are smaller.
    """

    def __init__(
        self,
        model: TransformerBridge,
        task: Task,
        *,
        shots: int,
        n: int | None,
        n_validation: int | None,
        seed: int,
        progress: bool | None,
    ) -> None:
        splits = task.splits(seed)
        self.n = at_most(n, len(splits.test))
        self.n_validation = at_most(n_validation, len(splits.validation))
        self._model, self._task, self._shots = model, task, shots
        self._seed, self._progress = seed, progress
        self._scorer: Scorer | None = None

    @property
    def device(self) -> str:
        """The kind of device that the model is on, such as "cuda"."""
        return device_of(self._model).type

    def maker(self, name: str, options: Mapping[str, Any]) -> "Maker | None":
        """What makes a method's vectors; None for a reference."""
        if name in REFERENCES:
            return None
        given = {"seed": self._seed, "progress": self._progress} | dict(options)
        return Maker(method_named(name), self._model, self._task, given)

    def cell(
        self, name: str, make: "Maker | None", layer: int | None
    ) -> tuple[list[Row], TaskVector | None]:
        """One cell's rows, and its vector."""
        vector, seconds = (None, 0.0) if make is None else make(layer)
        scores = self._scores(name, vector)
        tables = [scores.table()]
        if vector is not None and layer is not None:
            validation = evaluate(
                self._model,
                self._task,
                vector,
                split="validation",
                n=self.n_validation,
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
        return _rows(pd.concat(tables, ignore_index=True), about), vector

    def _scores(self, name: str, vector: TaskVector | None) -> Any:
        if self._scorer is None:
            self._scorer = Scorer(
                self._model,
                self._task,
                shots=self._shots,
                n=self.n,
                seed=self._seed,
                progress=self._progress,
            )
        return self._scorer.score(name, vector)


class Maker:
    """Makes one method's vectors; what its layers share is made once, and timed with each."""

    def __init__(
        self, method: Method, model: TransformerBridge, task: Task, options: dict[str, Any]
    ) -> None:
        self._method, self._model, self._task, self._options = method, model, task, options
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


def at_most(n: int | None, there: int) -> int:
    """How many of those that are there: all if None."""
    return there if n is None else min(n, there)


def _rows(table: pd.DataFrame, about: Row) -> list[Row]:
    table = table.drop(columns=["setting", "tokens"])
    table["split"] = table["split"].fillna("test")
    columns = ["task", "split", "score", "value", "low", "high", "n", "shots"]
    origin = ["model", "revision", "weights", "template", "seed"]
    return [
        {**{c: row[c] for c in columns}, **about, **{c: row[c] for c in origin}}
        for row in table.to_dict("records")
    ]
