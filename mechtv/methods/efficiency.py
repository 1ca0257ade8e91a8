"""The efficiency table: accuracy, parameters, seconds and memory of each way to do a task.

Protocol L3 of *Task Vectors, Learned Not Extracted* (arXiv 2509.24169): zero-shot, in-context, task
vectors, and what `train_baseline` trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pandas as pd
import torch
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.evaluation.accuracy import Evaluation, score
from mechtv.evaluation.many import PLAIN
from mechtv.evaluation.provenance import Provenance
from mechtv.evaluation.seeds import common_seed
from mechtv.forward.memory import full_passes, steady
from mechtv.forward.run import last_logits
from mechtv.methods.cost import costs_of, mean_length
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import SplitName, Task
from mechtv.vectors.vector import TaskVector

IN_CONTEXT = "in-context"


@dataclass(frozen=True, kw_only=True, eq=False)
class Baseline:
    """One way to make the model do a task, with what it costs.

    Args:
        name: `prompt`, `prefix`, `lora`; or, from `efficiency`, a setting or a vector's name.
        n_parameters: how many numbers were trained, or are written into the model.
        evaluation: accuracies and log-probability.
        seconds_per_query: the median over batches of one pass's time over its queries; `batch_size`
            how many these are. Each prompt is run in full, as one that was never seen before.
        seconds_plain: the same for the plain zero-shot model, in the same implementation: Hugging
            Face's for what `peft` trains, the bridge for all else. Compare ratios across the two.
        tokens_per_query: the mean length of the prompts, with a virtual token that is computed.
        peak_bytes: the memory that one pass over a batch takes above the model: the allocator's on
            a GPU; on Linux the process's, a lower bound; None where it cannot be read.
        seconds_training: with the validation after each epoch; None for what is not trained here.
        settings: every option; `curve` one row a training epoch.
    """

    name: str
    n_parameters: int
    evaluation: Evaluation
    seconds_per_query: float
    seconds_plain: float
    batch_size: int
    tokens_per_query: float
    peak_bytes: int | None
    seconds_training: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    curve: tuple[Mapping[str, float], ...] = ()

    def table(self) -> pd.DataFrame:
        """One row: parameters, accuracies with intervals, seconds, memory."""
        accuracy, label = self.evaluation.accuracy, self.evaluation.label_accuracy
        row = {
            "task": self.evaluation.task,
            "setting": self.name,
            "parameters": self.n_parameters,
            "accuracy": accuracy.value,
            "low": accuracy.low,
            "high": accuracy.high,
            "label_accuracy": None if label is None else label.value,
            "label_low": None if label is None else label.low,
            "label_high": None if label is None else label.high,
            "n": accuracy.n,
            "seconds_per_query": self.seconds_per_query,
            "relative_seconds": self.seconds_per_query / self.seconds_plain,
            "batch_size": self.batch_size,
            "tokens_per_query": self.tokens_per_query,
            "peak_mb": None if self.peak_bytes is None else self.peak_bytes / 1e6,
            "seconds_training": self.seconds_training,
        }
        return pd.DataFrame([row | self.evaluation.provenance.columns()]).astype(
            {name: float for name in row if name.startswith(("label_", "peak", "seconds"))}
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Efficiency:
    """Several ways to make the model do one task, on the same queries (L3)."""

    rows: tuple[Baseline, ...]

    def __getitem__(self, name: str) -> Baseline:
        """A row by its name.

        Raises:
            KeyError: if there is none.
        """
        return {row.name: row for row in self.rows}[name]

    def table(self) -> pd.DataFrame:
        """One row a setting; see `Baseline.table`."""
        return pd.concat([row.table() for row in self.rows], ignore_index=True)


def efficiency(
    model: TransformerBridge,
    task: Task,
    vectors: TaskVector | Mapping[str, TaskVector] | None = None,
    *,
    baselines: Sequence[Baseline] = (),
    shots: int = 8,
    split: SplitName = "test",
    n: int | None = None,
    seed: int | None = None,
    batch_size: int = 16,
    progress: bool | None = None,
) -> Efficiency:
    """Accuracy, parameters, seconds per query and peak memory, side by side (L3).

    The rows are zero-shot, in-context, each vector, and what `train_baseline` gave for the same
    queries.

    Args:
        vectors: one, or several by name.
        shots: the demonstrations of the in-context row.
        seed: fixes the splits and the demonstrations. If None, the seed that all the vectors were
            made with, so that none is scored on queries that it was trained on, or 0.
        batch_size: queries in a timed pass.

    Raises:
        InvalidInput: if a vector does not fit the model, two rows have one name, a baseline has
            other queries, the vectors have several seeds and none is given, or `shots` or
            `batch_size` is below 1.
    """
    if isinstance(vectors, TaskVector):
        vectors = {vectors.card.method: vectors}
    vectors = vectors or {}
    for name, number in {"batch_size": batch_size, "shots": shots}.items():
        if number < 1:
            raise InvalidInput(f"{name}={number} is too small; use 1 or more.")
    _check_distinct([PLAIN, IN_CONTEXT, *vectors, *(baseline.name for baseline in baselines)])
    seed = common_seed(vectors.values()) if seed is None else seed
    prompts = partial(Prompts.of, model, task, split=split, n=n, seed=seed)
    zero_shot, in_context = prompts(), prompts(shots=shots)
    _check_same_queries(baselines, zero_shot)
    rows = []
    for name, vector in {PLAIN: None, IN_CONTEXT: None, **vectors}.items():
        given, k = (in_context, shots) if name == IN_CONTEXT else (zero_shot, 0)
        evaluation = score(
            model,
            given,
            vector,
            task=task.name,
            setting=name,
            shots=k,
            split=split,
            provenance=Provenance.of(model, task, seed),
            progress=progress,
        )
        rows.append(_row(model, evaluation, vector, given, zero_shot, batch_size))
    return Efficiency(rows=(*rows, *baselines))


def _row(
    model: TransformerBridge,
    evaluation: Evaluation,
    vector: TaskVector | None,
    prompts: Prompts,
    zero_shot: Prompts,
    batch_size: int,
) -> Baseline:
    """A scored setting with its costs."""
    with torch.no_grad(), full_passes(), steady(model):
        costs = costs_of(
            partial(last_logits, model, vector=vector),
            prompts,
            partial(last_logits, model),
            zero_shot,
            batch_size=batch_size,
        )
    return Baseline(
        name=evaluation.setting,
        n_parameters=0 if vector is None else vector.n_parameters,
        evaluation=evaluation,
        tokens_per_query=mean_length(prompts),
        settings={} if vector is None else vector.card.settings,
        **costs,
    )


def _check_distinct(names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise InvalidInput(
                f"Two rows would be named {name!r}; name the vectors otherwise, or rename a "
                "baseline with dataclasses.replace(baseline, name=...)."
            )


def _check_same_queries(baselines: Sequence[Baseline], zero_shot: Prompts) -> None:
    queries = tuple(example.key for example in zero_shot.examples)
    for baseline in baselines:
        if baseline.evaluation.queries != queries:
            raise InvalidInput(
                f"The baseline {baseline.name!r} was scored on other queries; give it and this "
                "table the same task, split, n and seed."
            )
