"""Where a vector may be put: one place or many, zero-shot or behind demonstrations.

The flexibility table of *Task Vectors, Learned Not Extracted* (arXiv 2509.24169), for hidden-state
vectors (differences, added, as there), function vectors and learned ones. Extracted vectors suffer
where learned ones adapt: hidden states are read at the very places where they are written; a
function vector is one value, the same everywhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import pandas as pd
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput, UnknownName
from mechtv.evaluation.accuracy import evaluate
from mechtv.methods.function_vector import extract_function_vector
from mechtv.methods.hidden_state import extract_hidden_state
from mechtv.methods.learned import learn
from mechtv.methods.registry import METHODS as REGISTRY
from mechtv.methods.registry import check_options
from mechtv.progress import progress_bar
from mechtv.study.scoring import Row
from mechtv.study.store import Store, key_of
from mechtv.tasks.task import Task
from mechtv.vectors.vector import TaskVector

MethodName = Literal["hidden_state", "function_vector", "learned"]
METHODS: tuple[MethodName, ...] = ("hidden_state", "function_vector", "learned")
EVERY, LAST = 4, 5
SET_BY_PLACE = {"hidden_state": ("positions",), "learned": ("positions", "shots")}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a vector is put.

    Args:
        name: what the place is called in tables.
        shots: demonstrations in the prompts that it is put into.
    """

    name: str
    layers: tuple[int, ...]
    positions: tuple[int, ...] = (-1,)
    shots: int = 0


def places(n_layers: int, *, layer: int, other_position: int, shots: int) -> tuple[Place, ...]:
    """The six places of the table.

    "Every fourth layer" begins with the fourth: what enters the first is the token alone.
    """
    last = tuple(range(-LAST, 0))
    spread = tuple(range(EVERY - 1, n_layers, EVERY)) or (n_layers - 1,)
    return (
        Place(name="last token", layers=(layer,)),
        Place(name=f"position {other_position}", layers=(layer,), positions=(other_position,)),
        Place(name=f"last {LAST} positions", layers=(layer,), positions=last),
        Place(name=f"every {EVERY}th layer", layers=spread),
        Place(name=f"every {EVERY}th layer, last {LAST} positions", layers=spread, positions=last),
        Place(name=f"last token of {shots}-shot prompts", layers=(layer,), shots=shots),
    )


def flexibility(
    model: TransformerBridge,
    task: Task,
    methods: Sequence[MethodName] = METHODS,
    layer: int | None = None,
    *,
    other_position: int = -4,
    shots: int = 8,
    n: int | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    folder: str | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> pd.DataFrame:
    """Score each method's vector at six places, on the test split.

    Every prompt must have five tokens or more: use a template such as "qa".

    Args:
        layer: of the places with one layer; the middle one if None.
        other_position: the position of the second place, counted from the last token; -4 is the
            last token of the input in the template "qa".
        shots: demonstrations that hidden states are read behind, and of the last place.
        n: how many test queries; all if None.
        options: for a method's name what it is called with besides.
        folder: where finished cells are kept, as in `compare_methods`.

    Returns:
        One row a (place, method, score): value, 95 % interval, n; and first the model without a
        vector, zero-shot and in context.

    Raises:
        InvalidInput: for an unknown method, a layer that the model lacks, or prompts too short.
    """
    for name in methods:
        if name not in METHODS:
            raise UnknownName("method", name, METHODS)
        check_options(name, (options or {}).get(name, {}), SET_BY_PLACE.get(name, ()))
    strange = sorted(set(options or {}) - set(methods))
    if strange:
        raise InvalidInput(f"options are given for {', '.join(strange)}, which is not run.")
    chosen = model.cfg.n_layers // 2 if layer is None else layer
    table = places(model.cfg.n_layers, layer=chosen, other_position=other_position, shots=shots)
    cells: list[tuple[str | None, Place]] = [(None, table[0]), (None, table[-1])]
    cells += [(name, place) for place in table for name in methods]
    made = _Maker(model, task, shots, options or {}, seed=seed, progress=progress)
    store, rows = Store(folder), []
    with progress_bar(title=f"places, {task.name}", total=len(cells), show=progress) as bar:
        for method, place in cells:
            key = key_of(
                model,
                task,
                study="flexibility",
                method=method,
                place=asdict(place),
                shots=shots,
                n=n,
                options=dict((options or {}).get(method or "", {})),
                seed=seed,
            )
            found = store.rows(key)
            if found is None:
                vector = None if method is None else made(method, place)
                found = _scored(model, task, method, place, vector, n=n, seed=seed)
                store.keep(key, found)
            rows += found
            bar.update()
    return pd.DataFrame(rows)


class _Maker:
    """Makes a method's vector for a place; heads are ranked once."""

    def __init__(
        self,
        model: TransformerBridge,
        task: Task,
        shots: int,
        options: Mapping[str, Mapping[str, Any]],
        *,
        seed: int,
        progress: bool | None,
    ) -> None:
        self._model, self._task, self._shots, self._options = model, task, shots, options
        self._common: dict[str, Any] = {"seed": seed, "progress": progress}
        self._shared: dict[str, Any] | None = None

    def __call__(self, method: str, place: Place) -> TaskVector:
        options = self._common | dict(self._options.get(method, {}))
        if method == "function_vector":
            return self._function_vector(options).placed(place.layers, place.positions)
        where: dict[str, Any] = {"layer": place.layers, "positions": place.positions}
        if method == "hidden_state":
            own: dict[str, Any] = {"shots": self._shots, "operation": "add"} | options
            return extract_hidden_state(self._model, self._task, **where, **own)
        return learn(self._model, self._task, **where, shots=place.shots, **options)

    def _function_vector(self, options: dict[str, Any]) -> TaskVector:
        if self._shared is None:
            prepare = REGISTRY["function_vector"].shared
            assert prepare is not None
            self._shared = prepare(self._model, self._task, **options)
        return extract_function_vector(self._model, self._task, **options | self._shared)


def _scored(
    model: TransformerBridge,
    task: Task,
    method: str | None,
    place: Place,
    vector: TaskVector | None,
    *,
    n: int | None,
    seed: int,
) -> list[Row]:
    scores = evaluate(model, task, vector, shots=place.shots, n=n, seed=seed, progress=False)
    about = {
        "place": "no vector" if vector is None else place.name,
        "method": scores.setting if method is None else method,
        "layers": "" if vector is None else ", ".join(map(str, place.layers)),
        "positions": "" if vector is None else ", ".join(map(str, place.positions)),
        "parameters": 0 if vector is None else vector.n_parameters,
    }
    columns = ["task", "shots", "score", "value", "low", "high", "n", *scores.provenance.columns()]
    return [about | {c: row[c] for c in columns} for row in scores.table().to_dict("records")]
