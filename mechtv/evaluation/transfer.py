"""Each vector on every task: what a vector does away from home.

Protocol L11 of *Task Vectors, Learned Not Extracted* (arXiv 2509.24169). For one vector on its own
task use `evaluate`; for a sum of vectors on a composed task `evaluate_composition`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import pandas as pd
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput, UnknownName
from mechtv.evaluation.accuracy import Evaluation, ScoreName
from mechtv.evaluation.many import PLAIN, check_names, score_all, with_first
from mechtv.evaluation.seeds import common_seed
from mechtv.tasks.task import SplitName, Task
from mechtv.vectors.vector import TaskVector


@dataclass(frozen=True, kw_only=True, eq=False)
class TransferMatrix:
    """Every vector on every task.

    Args:
        evaluations: for each task, the plain model's (`zero-shot`) and each vector's; on the same
            queries.
        made_for: for each vector, the task on its card.
    """

    evaluations: Mapping[str, Mapping[str, Evaluation]]
    made_for: Mapping[str, str]

    def __getitem__(self, key: tuple[str, str]) -> Evaluation:
        """The evaluation of (vector, task); the vector `zero-shot` is none.

        Raises:
            KeyError: if there is none.
        """
        vector, task = key
        return self.evaluations[task][vector]

    def matrix(self, score: ScoreName = "full vocabulary") -> pd.DataFrame:
        """The values, one row a vector and one column a task; the last row is the plain model.

        Label-restricted accuracy is NaN for tasks with open answers.

        Raises:
            UnknownName: for an unknown score.
        """
        if score not in get_args(ScoreName):
            raise UnknownName("score", score, get_args(ScoreName))
        rows = [*self.made_for, PLAIN]
        values = {
            task: [_value(found[row], score) for row in rows]
            for task, found in self.evaluations.items()
        }
        return pd.DataFrame(values, index=pd.Index(rows, name="vector"), dtype=float)

    def table(self) -> pd.DataFrame:
        """One row a (vector, task, score): value, 95 % interval, n, and the task on its card."""
        parts = [
            found[row].table().assign(vector=row, made_for=self.made_for.get(row))
            for row in [*self.made_for, PLAIN]
            for found in self.evaluations.values()
        ]
        return with_first(pd.concat(parts, ignore_index=True), ["vector", "made_for"])


def transfer_matrix(
    model: TransformerBridge,
    vectors: Mapping[str, TaskVector],
    tasks: Sequence[Task],
    *,
    split: SplitName = "test",
    n: int | None = None,
    seed: int | None = None,
    batch_size: int = 64,
    progress: bool | None = None,
) -> TransferMatrix:
    """Score each vector, and no vector, on each task's zero-shot queries (L11).

    Args:
        vectors: by the names that their rows get.
        n: how many queries of each task, or fewer where its split is smaller; the whole split if
            None.
        seed: fixes the splits. If None, the seed that all the vectors were made with, so that no
            vector is scored on queries that it was trained on.

    Raises:
        InvalidInput: for no vectors or tasks, tasks of one name, a vector named `zero-shot`,
            vectors of several seeds and none given, or what `evaluate` refuses.
    """
    check_names(vectors, {PLAIN})
    if not tasks:
        raise InvalidInput("There are no tasks to score on; give at least one.")
    names = [task.name for task in tasks]
    if len(set(names)) < len(names):
        raise InvalidInput(f"The tasks {names!r} must have distinct names; rename with replace().")
    seed = common_seed(vectors.values()) if seed is None else seed
    evaluations = {
        task.name: score_all(
            model,
            task,
            vectors,
            split=split,
            n=n,
            seed=seed,
            batch_size=batch_size,
            show=progress,
        )
        for task in tasks
    }
    made_for = {name: vector.card.task for name, vector in vectors.items()}
    return TransferMatrix(evaluations=evaluations, made_for=made_for)


def _value(evaluation: Evaluation, score: ScoreName) -> float:
    if score == "label-restricted" and evaluation.correct_label is None:
        return math.nan
    return evaluation.estimate(score).value
