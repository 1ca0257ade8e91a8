"""How often the answer is right, under which score, and how probable it was.

Three scores, always named (docs/concepts.md):

- *full vocabulary*: the argmax at the last prompt token is the answer's first token;
- *label-restricted*: the same among the labels' first tokens, for tasks with a closed label set;
- *exact match*: greedy decoding yields every token of the answer. It is read off one pass under
  teacher forcing: greedy decoding yields the answer exactly if each of its tokens is the argmax
  after the true ones before it.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput, UnknownName
from mechtv.evaluation.intervals import (
    Comparison,
    Estimate,
    compare_means,
    compare_shares,
    mean,
    share,
)
from mechtv.evaluation.provenance import UNKNOWN, Provenance, setting_of
from mechtv.evaluation.seeds import seed_for
from mechtv.forward.likelihood import log_probabilities_at
from mechtv.forward.memory import steady
from mechtv.forward.run import in_batches, log_probabilities, logits_at
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import SplitName, Task
from mechtv.vectors.vector import TaskVector

N_SCORES = 5

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

    def estimate(self, score: ScoreName) -> Estimate:
        """A score by its name.

        Raises:
            InvalidInput: if the task has no closed label set, or the score is unknown.
        """
        if score not in get_args(ScoreName):
            raise UnknownName("score", score, get_args(ScoreName))
        if score == "log-probability":
            return self.log_probability
        hits = self._hits(score)
        if hits is None:
            raise InvalidInput(
                f"The task {self.task!r} has open answers, so it has no {score!r} score."
            )
        return share(hits)

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
    return score(
        model,
        prompts,
        vector,
        task=task.name,
        setting=setting_of(vector, shots),
        shots=shots,
        split=split,
        batch_size=batch_size,
        provenance=Provenance.of(model, task, seed),
        progress=progress,
    )


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
    evaluation, _ = score_and_distribution(
        model,
        prompts,
        vector,
        task=task,
        setting=setting,
        shots=shots,
        split=split,
        provenance=provenance,
        tokens=torch.empty(0, dtype=torch.long),
        batch_size=batch_size,
        progress=progress,
    )
    return evaluation


def score_and_distribution(
    model: TransformerBridge,
    prompts: Prompts,
    vector: TaskVector | None = None,
    *,
    task: str,
    setting: str,
    shots: int,
    split: str,
    provenance: Provenance = UNKNOWN,
    tokens: Int[Tensor, " token"] | None = None,
    batch_size: int = 64,
    progress: bool | None = None,
) -> tuple[Evaluation, Float[Tensor, "query token"]]:
    """The scores, and the log-probabilities of the first answer token, from the same passes.

    Args:
        tokens: whose log-probabilities are wanted (not renormalised); the whole vocabulary if None.
    """
    if prompts.labels:
        _ = prompts.first_label_tokens  # labels that share a token are refused before any pass

    def compute(batch: Prompts) -> Float[Tensor, "batch column"]:
        forced = force(model, batch.with_answers(), vector)
        first = forced.log_probabilities[forced.first]
        kept = first if tokens is None else first[:, tokens.to(first.device)]
        return torch.cat([forced_scores(forced, batch), kept.cpu().double()], dim=1)

    with torch.no_grad(), steady(model):
        columns = in_batches(
            prompts, compute, batch_size=batch_size, title=f"{setting}, {task}", show=progress
        )
    scores, distribution = columns[:, :N_SCORES], columns[:, N_SCORES:]
    correct, correct_label, exact, log_probability, predicted = scores.numpy().T
    evaluation = Evaluation(
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
    return evaluation, distribution


@dataclass(frozen=True, kw_only=True, eq=False)
class Forced:
    """What the model predicts at every answer token, given the true ones before it.

    Args:
        row: the prompt that each token answers; rows in order, each with its tokens in order.
        ids: the tokens; `first` the index of each row's first one.
        log_probabilities: of the whole vocabulary there, at least float32.
    """

    row: Int[Tensor, " token"]
    ids: Int[Tensor, " token"]
    first: Int[Tensor, " batch"]
    log_probabilities: Float[Tensor, "token d_vocab"]

    def mean_log_probability(self) -> Float[Tensor, " batch"]:
        """Each row's mean over its answer's tokens of their log-probability."""
        chosen = self.log_probabilities.gather(1, self.ids[:, None])[:, 0]
        return mean_by_row(chosen, self.row, len(self.first))

    def hits(self) -> Bool[Tensor, " token"]:
        """Which tokens are the most probable ones."""
        return self.log_probabilities.argmax(dim=-1) == self.ids

    def all_hit(self) -> Bool[Tensor, " batch"]:
        """Which rows' tokens are all the most probable ones."""
        return self._sum((~self.hits()).double()) == 0

    def _sum(self, values: Float[Tensor, " token"]) -> Float[Tensor, " batch"]:
        return values.new_zeros(len(self.first)).index_add(0, self.row, values)


def answer_log_probability(
    model: TransformerBridge, forced: Prompts, vector: TaskVector | None = None
) -> Float[Tensor, " batch"]:
    """The mean log-probability of each row's answer, as `force` has it, for training.

    Args:
        forced: from `Prompts.with_answers`.

    Raises:
        InvalidInput: if a row has no answer.
    """
    row, column = answer_places(forced)
    ids = torch.tensor([token for answer in forced.answers for token in answer])
    chosen = log_probabilities_at(model, forced, row, column, ids, vector)
    return mean_by_row(chosen, row.to(chosen.device), len(forced))


def mean_by_row(
    values: Float[Tensor, " token"], row: Int[Tensor, " token"], n_rows: int
) -> Float[Tensor, " batch"]:
    """The mean of each row's values."""
    zeros = values.new_zeros(n_rows)
    return zeros.index_add(0, row, values) / zeros.index_add(0, row, torch.ones_like(values))


def force(model: TransformerBridge, forced: Prompts, vector: TaskVector | None = None) -> Forced:
    """Run prompts that have their answers behind them (teacher forcing).

    Args:
        forced: from `Prompts.with_answers`.

    Raises:
        InvalidInput: if a row has no answer.
    """
    row, column = answer_places(forced)
    log_probabilities_there = log_probabilities(logits_at(model, forced, row, column, vector))
    device = log_probabilities_there.device
    ids = torch.tensor([token for answer in forced.answers for token in answer])
    return Forced(
        row=row.to(device),
        ids=ids.to(device),
        first=torch.searchsorted(row, torch.arange(len(forced))).to(device),
        log_probabilities=log_probabilities_there,
    )


def answer_places(forced: Prompts) -> tuple[Int[Tensor, " token"], Int[Tensor, " token"]]:
    """The rows and the columns that predict the answers' tokens."""
    if not all(forced.answers):
        raise InvalidInput("These prompts have no answers; build them from a task.")
    row = [number for number, answer in enumerate(forced.answers) for _ in answer]
    offset = [place for answer in forced.answers for place in range(len(answer))]
    rows = torch.tensor(row)
    return rows, forced.last[rows] + torch.tensor(offset)


def score_columns(
    model: TransformerBridge, prompts: Prompts, vector: TaskVector | None
) -> Float[Tensor, "batch score"]:
    """`forced_scores` of the model under a vector."""
    return forced_scores(force(model, prompts.with_answers(), vector), prompts)


def forced_scores(forced: Forced, prompts: Prompts) -> Float[Tensor, "batch score"]:
    """Each row's full-vocabulary, label-restricted and exact hit, log-probability, top token."""
    at_first = forced.log_probabilities[forced.first]
    columns = (
        forced.hits()[forced.first],
        _label_hits(at_first, forced.ids[forced.first], prompts),
        forced.all_hit(),
        forced.mean_log_probability(),
        at_first.argmax(dim=-1),
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
