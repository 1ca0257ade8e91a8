"""All scores of many settings on one set of queries: the in-context run is made once.

Use `evaluate` and `dntp` for one score of one vector.
"""

import time
from dataclasses import dataclass

import pandas as pd
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.evaluation.accuracy import Evaluation, score_and_distribution
from mechtv.evaluation.dntp import Divergence, Over, answer_space, kl_divergence, restricted
from mechtv.evaluation.provenance import Provenance
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import SplitName, Task
from mechtv.vectors.vector import TaskVector


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """One setting, scored.

    Args:
        evaluation: accuracies and log-probability.
        divergences: dNTP over the `vocabulary`, and before it over `labels`, unless all answers
            begin with one token.
        seconds_per_query: of the pass that scored it, batched; prompts and model were ready.
    """

    evaluation: Evaluation
    divergences: tuple[Divergence, ...]
    seconds_per_query: float

    def table(self) -> pd.DataFrame:
        """One row a score: value, 95 % interval, n."""
        parts = [self.evaluation.table(), *(each.table() for each in self.divergences)]
        return pd.concat(parts, ignore_index=True)


class Scorer:
    """Scores settings on the queries of one split.

    Args:
        shots: demonstrations of the in-context run, from which dNTP is measured.
        n: how many queries; the whole split if None.
        seed: fixes the splits and the demonstrations.

    Raises:
        InvalidInput: for labels that share a first token, or too few examples for the shots.
    """

    def __init__(
        self,
        model: TransformerBridge,
        task: Task,
        *,
        shots: int,
        split: SplitName = "test",
        n: int | None = None,
        seed: int = 0,
        batch_size: int = 64,
        progress: bool | None = None,
    ) -> None:
        self.model, self.task, self.shots, self.split = model, task, shots, split
        self._batch_size, self._progress = batch_size, progress
        self.zero_shot = Prompts.of(model, task, split=split, n=n, seed=seed)
        self.in_context = Prompts.of(model, task, split=split, shots=shots, n=n, seed=seed)
        self._provenance = Provenance.of(model, task, seed)
        tokens = answer_space(model, task)
        self._tokens = tokens if len(tokens) > 1 else None  # over one token nothing can differ
        first = self.zero_shot.select(range(min(2, len(self.zero_shot))))
        self._timed(first, "zero-shot", None)  # what a first pass costs is nobody's
        self._known = self._run("in-context", None)

    def score(self, name: str, vector: TaskVector | None = None) -> Scores:
        """The scores of `in-context`, or of anything else on zero-shot prompts under a vector."""
        if name == "in-context" and vector is not None:
            raise InvalidInput("The in-context run has no vector; give the vector another name.")
        known = name == "in-context"
        evaluation, given, seconds = self._known if known else self._run(name, vector)
        divergences = [self._divergence(name, given, "vocabulary", None)]
        if self._tokens is not None:
            divergences.insert(0, self._divergence(name, given, "labels", self._tokens))
        return Scores(
            evaluation=evaluation, divergences=tuple(divergences), seconds_per_query=seconds
        )

    def _run(
        self, name: str, vector: TaskVector | None
    ) -> tuple[Evaluation, Float[Tensor, "query d_vocab"], float]:
        prompts = self.in_context if name == "in-context" else self.zero_shot
        return self._timed(prompts, name, vector)

    def _timed(
        self, prompts: Prompts, name: str, vector: TaskVector | None
    ) -> tuple[Evaluation, Float[Tensor, "query d_vocab"], float]:
        began = time.perf_counter()
        evaluation, distribution = score_and_distribution(
            self.model,
            prompts,
            vector,
            task=self.task.name,
            setting=name,
            shots=self.shots if name == "in-context" else 0,
            split=self.split,
            provenance=self._provenance,
            batch_size=self._batch_size,
            progress=self._progress,
        )
        return evaluation, distribution, (time.perf_counter() - began) / len(prompts)

    def _divergence(
        self, name: str, given: Tensor, over: Over, tokens: Int[Tensor, " token"] | None
    ) -> Divergence:
        reference = restricted(self._known[1], tokens)
        return Divergence(
            task=self.task.name,
            setting=name,
            over=over,
            n_tokens=reference.shape[1],
            shots=self.shots,
            per_query=kl_divergence(reference, restricted(given, tokens)).cpu().double().numpy(),
            provenance=self._provenance,
        )
