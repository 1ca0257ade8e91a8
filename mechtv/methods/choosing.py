"""At which layer a method's vector works best: chosen on the validation split, for any method."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

import pandas as pd
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput, UnknownName
from mechtv.evaluation.accuracy import Evaluation, ScoreName, evaluate
from mechtv.methods.layers import as_layers
from mechtv.progress import progress as progress_over
from mechtv.tasks.task import SplitName, Task
from mechtv.vectors.vector import TaskVector


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerChoice:
    """One method at several layers, scored.

    Args:
        by: the score that decides; the answer's log-probability decides between equals.
        layers, vectors, evaluations: one entry a layer, in rising order.
    """

    by: ScoreName
    layers: tuple[int, ...]
    vectors: tuple[TaskVector, ...]
    evaluations: tuple[Evaluation, ...]

    @property
    def layer(self) -> int:
        """The best layer; the earlier of two equals."""
        return self.layers[self._best]

    @property
    def vector(self) -> TaskVector:
        """The vector of the best layer."""
        return self.vectors[self._best]

    def table(self) -> pd.DataFrame:
        """One row a layer: the score that decides, its 95 % interval, n, and the log-probability.

        `best` marks the layer that was chosen.
        """
        rows = []
        for number, (layer, evaluation) in enumerate(
            zip(self.layers, self.evaluations, strict=True)
        ):
            score = evaluation.estimate(self.by)
            rows.append(
                {
                    "task": evaluation.task,
                    "setting": evaluation.setting,
                    "split": evaluation.split,
                    "layer": layer,
                    "score": self.by,
                    "value": score.value,
                    "low": score.low,
                    "high": score.high,
                    "n": score.n,
                    "log_probability": evaluation.log_probability.value,
                    "best": number == self._best,
                }
            )
        return pd.DataFrame(rows)

    @property
    def _best(self) -> int:
        def rank(number: int) -> tuple[float, float]:
            evaluation = self.evaluations[number]
            return evaluation.estimate(self.by).value, evaluation.log_probability.value

        return max(range(len(self.layers)), key=rank)


def choose_layer(
    model: TransformerBridge,
    task: Task,
    make: Callable[[int], TaskVector],
    layers: Sequence[int] | None = None,
    *,
    by: ScoreName | None = None,
    split: SplitName = "validation",
    n: int | None = None,
    seed: int | None = None,
    progress: bool | None = None,
) -> LayerChoice:
    """Make a vector at each layer and score it on queries that are not the test's.

        choose_layer(model, task, lambda layer: extract_hidden_state(model, task, layer)).vector

    Args:
        make: the method; its vector for a layer.
        layers: which are tried; all of the model's if None.
        by: the score that decides: label-restricted accuracy for tasks with a closed label set,
            else full-vocabulary accuracy, if None.
        n: how many queries; the whole split if None.
        seed: fixes the splits; each vector's own, as in `evaluate`, if None.

    Raises:
        InvalidInput: for no layers, one given twice, an unknown score, or a label-restricted one of
            open answers.
    """
    if by is not None and by not in get_args(ScoreName):
        raise UnknownName("score", by, get_args(ScoreName))
    if by == "label-restricted" and task.labels is None:
        raise InvalidInput(
            f'The task {task.name!r} has open answers; choose its layer by="full vocabulary".'
        )
    tried = as_layers(range(model.cfg.n_layers) if layers is None else layers)
    title = f"layers for {task.name}"
    vectors, evaluations = [], []
    for layer in progress_over(tried, title=title, show=progress, total=len(tried)):
        vectors.append(make(layer))
        evaluations.append(
            evaluate(model, task, vectors[-1], split=split, n=n, seed=seed, progress=False)
        )
    return LayerChoice(
        by=by or ("label-restricted" if task.labels else "full vocabulary"),
        layers=tried,
        vectors=tuple(vectors),
        evaluations=tuple(evaluations),
    )
