"""Many vectors on one task's queries: the prompts are run once, and behind them every vector.

What `transfer_matrix` and `evaluate_composition` share. For one vector use `evaluate`.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pandas as pd
import torch
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.evaluation.accuracy import Evaluation, answer_places, score
from mechtv.evaluation.provenance import Provenance, setting_of
from mechtv.forward.memory import steady
from mechtv.forward.run import kept
from mechtv.progress import progress
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import SplitName, Task
from mechtv.vectors.vector import TaskVector

PLAIN = "zero-shot"


def score_all(
    model: TransformerBridge,
    task: Task,
    vectors: Mapping[str, TaskVector],
    *,
    split: SplitName,
    n: int | None,
    seed: int,
    batch_size: int,
    show: bool | None,
) -> dict[str, Evaluation]:
    """Each vector's evaluation, and the plain model's (`zero-shot`), on one task's queries.

    Args:
        n: how many queries, or all where the split is smaller.
    """
    if n is not None:
        n = min(n, len(task.split(split, seed=seed)))
    prompts = Prompts.of(model, task, split=split, n=n, seed=seed)
    settings: dict[str, TaskVector | None] = {**vectors, PLAIN: None}
    found = {}
    with torch.no_grad(), steady(model), _prepared(model, prompts, list(vectors.values())):
        for name, vector in progress(
            settings.items(), title=f"vectors on {task.name}", show=show, total=len(settings)
        ):
            found[name] = score(
                model,
                prompts,
                vector,
                task=task.name,
                setting=setting_of(vector, shots=0),
                shots=0,
                split=split,
                provenance=Provenance.of(model, task, seed),
                batch_size=batch_size,
                progress=False,
            )
    return found


def check_names(vectors: Mapping[str, TaskVector], taken: Collection[str]) -> None:
    """Check that there are vectors, and that none has the name of another row.

    Raises:
        InvalidInput: otherwise.
    """
    if not vectors:
        raise InvalidInput("There are no vectors to score; give at least one.")
    clash = sorted(set(taken) & set(vectors))
    if clash:
        raise InvalidInput(f"A vector is named {clash[0]!r}, which names a row of its own; rename.")


def with_first(table: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """The same table with some columns before the others."""
    return table[[*columns, *(name for name in table.columns if name not in columns)]]


def _prepared(
    model: TransformerBridge, prompts: Prompts, vectors: Sequence[TaskVector]
) -> AbstractContextManager[None]:
    """Inside, passes under any of the vectors begin where the first of them acts."""
    if len(vectors) < 2:
        return nullcontext()
    every = tuple(edit for vector in vectors for edit in vector.edits)
    acts_on = {vector.acts_on for vector in vectors}
    union = replace(vectors[0], edits=every, acts_on=acts_on.pop() if len(acts_on) == 1 else "both")
    forced = prompts.with_answers()
    return kept(model, forced, union, places=answer_places(forced))
