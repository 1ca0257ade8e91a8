"""How often the answer is right, under which score, and how probable it was.

Three scores, always named (METHODS, section 1):

- *full vocabulary*: the argmax at the last prompt token is the answer's first token;
- *label-restricted*: the same among the labels' first tokens, for tasks with a closed label set;
- *exact match*: greedy decoding yields every token of the answer. It is read off one pass under
  teacher forcing: greedy decoding yields the answer exactly if each of its tokens is the argmax
  after the true ones before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.evaluation.intervals import (
    Comparison,
    Estimate,
    compare_means,
    compare_shares,
    mean,
    share,
)
from mechtv.evaluation.provenance import UNKNOWN, Provenance
from mechtv.forward.memory import steady
from mechtv.forward.run import in_batches, run
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import SplitName, Task
from mechtv.vectors.vector import TaskVector

ScoreName = Literal["full vocabulary", "label-restricted", "exact match", "log-probability"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """Scores of one setting on one set of queries.

    Args:
        task, setting, shots, split: what was scored; `setting` is the vector's method, `zero-shot`
            or `in-context`.
        queries: the prompts' queries, in order.
        correct: full-vocabulary hits; `correct_label` label-restricted hits (None for open
            answers); `correct_exact` exact matches.
        log_probabilities: for each query, the mean token log-probability (natural log) of its
            answer.
        predictions: the most probable next token of each query, as text.
        provenance: model, weights, template and seed.
    """

    task: str
    setting: str
    shots: int
    split: str
    queries: tuple[tuple[str, ...], ...]
    correct: Bool[np.ndarray, " query"]
    correct_label: Bool[np.ndarray, " query"] | None
    correct_exact: Bool[np.ndarray, " query"]
    log_probabilities: Float[np.ndarray, " query"]
    predictions: tuple[str, ...]
    provenance: Provenance = UNKNOWN

    @property
    def accuracy(self) -> Estimate:
        """Full-vocabulary accuracy."""
        return share(self.correct)

    @property
    def label_accuracy(self) -> Estimate | None:
        """Label-restricted accuracy; None for tasks with open answers."""
        return None if self.correct_label is None else share(self.correct_label)

    @property
    def exact_match(self) -> Estimate:
        """Accuracy over whole answers."""
        return share(self.correct_exact)

    @property
    def log_probability(self) -> Estimate:
        """The mean over queries of the answer's mean token log-probability."""
        return mean(self.log_probabilities)

    def table(self) -> pd.DataFrame:
        """One row a score: value, 95 % interval, n."""
        scores = {
            "accuracy, full vocabulary": self.accuracy,
            "accuracy, label-restricted": self.label_accuracy,
            "exact match": self.exact_match,
            "log-probability": self.log_probability,
        }
        about = {
            "task": self.task,
            "setting": self.setting,
            "shots": self.shots,
            "split": self.split,
        }
        return pd.DataFrame(
            about
            | {"score": name, "value": e.value, "low": e.low, "high": e.high, "n": e.n}
            | self.provenance.columns()
            for name, e in scores.items()
            if e is not None
        )

    def compare(self, other: "Evaluation", score: ScoreName = "full vocabulary") -> Comparison:
        """This score minus another's on the same queries, with a paired test.

        Args:
            score: `full vocabulary`, `label-restricted` or `exact match` (exact McNemar test), or
                `log-probability` (Wilcoxon signed-rank test).

        Raises:
            InvalidInput: if the queries differ, or the task has no closed label set.
        """
        if self.queries != other.queries:
            raise InvalidInput(
                f"{self.setting!r} and {other.setting!r} were scored on different queries; "
                "use the same task, split, n and seed for both."
            )
        if score == "log-probability":
            return compare_means(self.log_probabilities, other.log_probabilities)
        first, second = self._hits(score), other._hits(score)
        if first is None or second is None:
            raise InvalidInput(
                f"The task {self.task!r} has open answers, so it has no {score!r} score to compare."
            )
        return compare_shares(first, second)

    def _hits(self, score: ScoreName) -> Bool[np.ndarray, " query"] | None:
        if score == "label-restricted":
            return self.correct_label
        return self.correct_exact if score == "exact match" else self.correct


def evaluate(
    model: TransformerBridge,
    task: Task,
    vector: TaskVector | None = None,
    *,
    shots: int = 0,
    split: SplitName = "test",
    n: int | None = None,
    seed: int | None = None,
    batch_size: int = 64,
    progress: bool | None = None,
) -> Evaluation:
    """Score the plain model, the in-context model, or a vector, on one split.

    Args:
        vector: None for the plain model.
        shots: demonstrations before each query: 0 is zero-shot.
        n: how many queries; the whole split if None.
        seed: fixes the splits and the demonstrations. If None, the seed that the vector was made
            with, so that the splits are the same, or 0.

    Raises:
        InvalidInput: if the vector does not fit the model, the pool is too small, a prompt exceeds
            the context, or labels share a first token.
    """
    seed = seed_for(vector) if seed is None else seed
    prompts = Prompts.of(model, task, split=split, shots=shots, n=n, seed=seed)
    plain = "in-context" if shots else "zero-shot"
    return score(
        model,
        prompts,
        vector,
        task=task.name,
        setting=plain if vector is None else vector.card.method,
        shots=shots,
        split=split,
        batch_size=batch_size,
        provenance=Provenance.of(model, task, seed),
        progress=progress,
    )


def seed_for(vector: TaskVector | None) -> int:
    """The seed whose splits a vector was made on; 0 for the plain model or an unknown seed."""
    return 0 if vector is None or vector.card.seed is None else vector.card.seed


def score(
    model: TransformerBridge,
    prompts: Prompts,
    vector: TaskVector | None = None,
    *,
    task: str,
    setting: str,
    shots: int,
    split: str,
    provenance: Provenance = UNKNOWN,
    batch_size: int = 64,
    progress: bool | None = None,
) -> Evaluation:
    """`evaluate` for prompts that are already built."""
    if prompts.labels:
        _ = prompts.first_label_tokens  # labels that share a token are refused before any pass
    with torch.no_grad(), steady(model):
        columns = in_batches(
            prompts,
            lambda batch: score_columns(model, batch, vector),
            batch_size=batch_size,
            title=f"{setting}, {task}",
            show=progress,
        )
    correct, correct_label, exact, log_probability, predicted = columns.numpy().T
    return Evaluation(
        task=task,
        setting=setting,
        shots=shots,
        split=split,
        queries=tuple(example.key for example in prompts.examples),
        correct=correct.astype(bool),
        correct_label=correct_label.astype(bool) if prompts.labels else None,
        correct_exact=exact.astype(bool),
        log_probabilities=log_probability,
        predictions=tuple(model.tokenizer.decode([int(token)]) for token in predicted),
        provenance=provenance,
    )


def answer_log_probabilities(
    model: TransformerBridge, prompts: Prompts, vector: TaskVector | None = None
) -> tuple[Float[Tensor, "batch answer d_vocab"], Int[Tensor, "batch answer"], Bool[Tensor, "b a"]]:
    """Log-probabilities at every answer position under teacher forcing.

    Returns:
        The log-probabilities (at least float32), the answers' ids, and which of them are real.
    """
    forced = prompts.with_answers()
    ids, real = _rectangle(prompts.answers)
    logits = run(model, forced, vector, columns=answer_columns(forced))
    wide = logits.double() if logits.dtype == torch.float64 else logits.float()
    return wide.log_softmax(dim=-1), ids.to(logits.device), real.to(logits.device)


def answer_columns(forced: Prompts) -> Int[Tensor, "batch answer"]:
    """The columns that predict the answers' tokens; rows with short answers repeat their last."""
    lengths = torch.tensor([len(answer) for answer in forced.answers])
    offsets = torch.arange(int(lengths.max()))
    return forced.last[:, None] + offsets.clamp(max=(lengths - 1)[:, None])


def mean_answer_log_probability(
    log_probabilities: Float[Tensor, "batch answer d_vocab"],
    ids: Int[Tensor, "batch answer"],
    real: Bool[Tensor, "batch answer"],
) -> Float[Tensor, " batch"]:
    """Each row's mean over its answer's tokens of their log-probability."""
    chosen = log_probabilities.gather(2, ids[:, :, None])[:, :, 0]
    return (chosen * real).sum(1) / real.sum(1)


def score_columns(
    model: TransformerBridge, prompts: Prompts, vector: TaskVector | None
) -> Float[Tensor, "batch score"]:
    """Each row's full-vocabulary, label-restricted and exact hit, log-probability, top token."""
    log_probabilities, ids, real = answer_log_probabilities(model, prompts, vector)
    best = log_probabilities.argmax(dim=-1)
    hit = best == ids
    label_hit = _label_hits(log_probabilities[:, 0], ids[:, 0], prompts)
    columns = (
        hit[:, 0],
        label_hit,
        (hit | ~real).all(dim=1),
        mean_answer_log_probability(log_probabilities, ids, real),
        best[:, 0],
    )
    return torch.stack([column.cpu().double() for column in columns], dim=1)


def _label_hits(
    log_probabilities: Float[Tensor, "batch d_vocab"],
    answers: Int[Tensor, " batch"],
    prompts: Prompts,
) -> Bool[Tensor, " batch"]:
    if not prompts.labels:
        return torch.zeros_like(answers, dtype=torch.bool)
    labels = prompts.first_label_tokens.to(log_probabilities.device)
    return labels[log_probabilities[:, labels].argmax(dim=-1)] == answers


def _rectangle(
    rows: Sequence[Sequence[int]],
) -> tuple[Int[Tensor, "batch answer"], Bool[Tensor, "batch answer"]]:
    if not all(rows):
        raise InvalidInput("These prompts have no answers; build them from a task.")
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[row[-1]] * (width - len(row))] for row in rows])
    real = torch.tensor([[column < len(row) for column in range(width)] for row in rows])
    return ids, real
