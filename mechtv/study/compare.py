"""Every method at several layers on several tasks: accuracies, dNTP, seconds, in one table.

Each (task, method, layer) is a cell; finished cells are kept in a folder and not computed again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.methods.layers import as_layers
from mechtv.methods.registry import METHODS, check_options, method_named
from mechtv.overview import evenly_spread
from mechtv.progress import progress_bar
from mechtv.study.scoring import REFERENCES, Bench, Row, layers_of
from mechtv.study.store import Key, Store, key_of
from mechtv.tasks.task import Task

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
            best = max(layers, key=lambda layer: rank(own, layer)) if len(layers) else None
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
    total = len(tasks) * sum(len(layers_of(name, depths)) for name in (*REFERENCES, *names))
    with progress_bar(title="cells", total=total, show=progress) as bar:
        for task in tasks:
            bench = Bench(
                model,
                task,
                shots=shots,
                n=n,
                n_validation=n_validation,
                seed=seed,
                progress=progress,
            )
            key = partial(key_of, model, task, shots=shots, seed=seed)
            cells = _Cells(bench, options, store, key)
            for name in (*REFERENCES, *names):
                for found, is_new in cells.of(name, layers_of(name, depths)):
                    rows += found
                    bar.update()
                    if is_new and on_finished is not None:
                        on_finished(found)
    return MethodComparison(rows=pd.DataFrame(rows).astype({"layer": "Int64"}))


class _Cells:
    """The cells of one task, looked up in the store or made."""

    def __init__(
        self, bench: Bench, options: Options, store: Store, key: Callable[..., Key]
    ) -> None:
        self._bench, self._options, self._store, self._key = bench, options, store, key

    def of(self, name: str, layers: Sequence[int | None]) -> Iterator[tuple[list[Row], bool]]:
        """Each layer's rows, and whether they are new."""
        options = dict(self._options.get(name, {}))
        make = self._bench.maker(name, options)
        for layer in layers:
            key = self._key(
                method=name,
                layer=layer,
                n=self._bench.n,
                n_validation=self._bench.n_validation,
                options=options,
            )
            rows = self._store.rows(key)
            is_new = rows is None
            if rows is None:
                rows, vector = self._bench.cell(name, make, layer)
                self._store.keep(key, rows, vector)
            yield rows, is_new


def rank(rows: pd.DataFrame, layer: Any) -> tuple[float, float]:
    """By what a task's and method's layers are ordered: accuracy and log-probability on validation.

    Label-restricted accuracy for tasks with a closed label set, else full-vocabulary accuracy.
    """
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
