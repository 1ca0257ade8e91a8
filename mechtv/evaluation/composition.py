"""A sum of vectors on a composed task, beside its parts.

Protocol L12 of *Task Vectors, Learned Not Extracted* (arXiv 2509.24169). The sum itself is vector
algebra (`a + 0.5 * b`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import get_args

import pandas as pd
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.evaluation.accuracy import Evaluation, ScoreName
from mechtv.evaluation.many import PLAIN, check_names, score_all, with_first
from mechtv.evaluation.seeds import common_seed
from mechtv.tasks.task import SplitName, Task
from mechtv.vectors.vector import TaskVector

SUM = "sum"


@dataclass(frozen=True, kw_only=True, eq=False)
class Composition:
    """A sum of vectors on a composed task, beside its parts and the plain model.

    Args:
        evaluations: by name: the parts, `sum`, and `zero-shot`; on the same queries.
        vector: the sum.
    """

    task: str
    evaluations: Mapping[str, Evaluation]
    vector: TaskVector

    @property
    def best_part(self) -> str:
        """The part with the most hits (full vocabulary), or among equals the likeliest answers.

        Chosen on the queries that it is then compared on, which can only favour it over the sum.
        """
        parts = [name for name in self.evaluations if name not in (SUM, PLAIN)]
        return max(parts, key=lambda name: _rank(self.evaluations[name]))

    def table(self) -> pd.DataFrame:
        """One row a (part, score): value, 95 % interval, n."""
        parts = [found.table().assign(part=name) for name, found in self.evaluations.items()]
        return with_first(pd.concat(parts, ignore_index=True), ["part"])

    def comparison(self) -> pd.DataFrame:
        """One row a score: the sum minus its best part on the same queries, with a paired test."""
        together, best = self.evaluations[SUM], self.evaluations[self.best_part]
        rows = []
        for name in get_args(ScoreName):
            if name == "label-restricted" and together.correct_label is None:
                continue
            found = together.compare(best, name)
            rows.append(
                {
                    "score": name,
                    "best_part": self.best_part,
                    "difference": found.difference.value,
                    "low": found.difference.low,
                    "high": found.difference.high,
                    "p_value": found.p_value,
                    "test": found.test,
                    "n": found.difference.n,
                }
            )
        return pd.DataFrame(rows)


def evaluate_composition(
    model: TransformerBridge,
    task: Task,
    parts: Mapping[str, TaskVector],
    *,
    weights: Mapping[str, float] | None = None,
    split: SplitName = "test",
    n: int | None = None,
    seed: int | None = None,
    batch_size: int = 64,
    progress: bool | None = None,
) -> Composition:
    """Score each part alone, their sum, and no vector on a composed task (L12).

    For instance English to French plus masculine to feminine, on masculine to feminine in French.

    Args:
        task: the composed task; none of the parts needs to be made for it.
        parts: additive vectors by name.
        weights: of the parts in the sum; 1 each if None. A part alone is scored as it is.
        n, seed: as for `transfer_matrix`.

    Raises:
        InvalidInput: for fewer than two parts, parts that do not add, weights that do not fit, or
            what `evaluate` refuses.
    """
    check_names(parts, {PLAIN, SUM})
    if len(parts) < 2:
        raise InvalidInput(f"One part, {next(iter(parts))!r}, is no composition; give two or more.")
    if weights is not None and set(weights) != set(parts):
        raise InvalidInput(
            f"The weights {sorted(weights)} do not fit the parts {sorted(parts)}; give one each."
        )
    seed = common_seed(parts.values()) if seed is None else seed
    weighted = [v if weights is None else v.scaled(weights[name]) for name, v in parts.items()]
    together = reduce(add, weighted)
    evaluations = score_all(
        model,
        task,
        {**parts, SUM: together},
        split=split,
        n=n,
        seed=seed,
        batch_size=batch_size,
        show=progress,
    )
    return Composition(task=task.name, evaluations=evaluations, vector=together)


def _rank(evaluation: Evaluation) -> tuple[int, float]:
    return int(evaluation.correct.sum()), float(evaluation.log_probabilities.mean())
