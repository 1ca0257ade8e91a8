"""dNTP: how far a vector's next-token distribution is from the in-context one.

The mean over queries of KL(P_icl || P_vector) in nats (*Distributional Alignment as a Criterion for
Designing Task Vectors in In-Context Learning*, section 3). It needs no answers.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.evaluation.intervals import Estimate, mean
from mechtv.evaluation.provenance import UNKNOWN, Provenance, setting_of
from mechtv.evaluation.seeds import seed_for
from mechtv.forward.memory import steady
from mechtv.forward.run import in_batches, last_logits, log_probabilities
from mechtv.tasks.chat import template_for
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import SplitName, Task
from mechtv.tasks.tokens import continuation_ids
from mechtv.vectors.vector import TaskVector

Over = Literal["labels", "vocabulary"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Divergence:
    """dNTP of one setting.

    Args:
        per_query: KL(P_icl || P_vector) of each query, in nats.
        over: the tokens that the distributions range over; `n_tokens` how many these are.
        shots: the demonstrations of the in-context run.
        provenance: model, weights, template and seed.
    """

    task: str
    setting: str
    over: Over
    n_tokens: int
    shots: int
    per_query: Float[np.ndarray, " query"]
    provenance: Provenance = UNKNOWN

    @property
    def estimate(self) -> Estimate:
        """The mean over queries, with its interval."""
        return mean(self.per_query)

    @property
    def value(self) -> float:
        """The mean over queries."""
        return self.estimate.value

    def __float__(self) -> float:
        return self.value

    def table(self) -> pd.DataFrame:
        """One row: value, 95 % interval, n."""
        e = self.estimate
        return pd.DataFrame(
            [
                {
                    "task": self.task,
                    "setting": self.setting,
                    "shots": self.shots,
                    "score": f"dNTP over {self.over}",
                    "value": e.value,
                    "low": e.low,
                    "high": e.high,
                    "n": e.n,
                    "tokens": self.n_tokens,
                }
                | self.provenance.columns()
            ]
        )


def dntp(
    model: TransformerBridge,
    task: Task,
    vector: TaskVector | None = None,
    *,
    shots: int = 8,
    over: Over = "labels",
    vector_shots: int = 0,
    split: SplitName = "test",
    n: int | None = None,
    seed: int | None = None,
    batch_size: int = 64,
    progress: bool | None = None,
) -> Divergence:
    """The divergence of a vector's next-token distribution from the in-context one.

    Args:
        vector: None for the plain model.
        shots: demonstrations of the in-context run; `vector_shots` those of the vector's run.
        seed: fixes the splits and the demonstrations; the vector's own, or 0, if None.
        over: `labels` renormalises over the labels' first tokens (for open answers: the first
            tokens of all of the task's answers); `vocabulary` takes the whole distribution.

    Raises:
        InvalidInput: for an unknown `over`, or labels that share a first token.
    """
    if over not in get_args(Over):
        raise InvalidInput(f"over={over!r} is unknown; use 'labels' or 'vocabulary'.")
    seed = seed_for(vector) if seed is None else seed
    tokens = answer_space(model, task) if over == "labels" else None
    if tokens is not None and len(tokens) < 2:
        raise InvalidInput(
            f"All answers of {task.name!r} begin with one token, so distributions over labels "
            "cannot differ; use over='vocabulary'."
        )

    def distribution(k: int, applied: TaskVector | None, title: str) -> Tensor:
        prompts = Prompts.of(model, task, split=split, shots=k, n=n, seed=seed)
        return next_token_log_probabilities(
            model, prompts, applied, tokens, batch_size=batch_size, title=title, show=progress
        )

    setting = setting_of(vector, vector_shots)
    reference = distribution(shots, None, "in-context distribution")
    given = distribution(vector_shots, vector, f"{setting} distribution")
    return Divergence(
        task=task.name,
        setting=setting,
        over=over,
        n_tokens=reference.shape[1],
        shots=shots,
        per_query=kl_divergence(reference, given).cpu().double().numpy(),
        provenance=Provenance.of(model, task, seed),
    )


def kl_divergence(
    reference: Float[Tensor, "query token"], given: Float[Tensor, "query token"]
) -> Float[Tensor, " query"]:
    """KL(reference || given) of each row of log-probabilities, in nats; 0 log 0 is 0.

    Raises:
        InvalidInput: if there are no rows.
    """
    if not len(reference):
        raise InvalidInput("There are no queries to compare; give at least one.")
    probability = reference.exp()
    terms = probability * (reference - given)
    return torch.where(probability > 0, terms, torch.zeros_like(terms)).sum(dim=-1)


def next_token_log_probabilities(
    model: TransformerBridge,
    prompts: Prompts,
    vector: TaskVector | None,
    tokens: Int[Tensor, " token"] | None,
    *,
    batch_size: int = 64,
    title: str = "distribution",
    show: bool | None = False,
) -> Float[Tensor, "query token"]:
    """Log-probabilities at the last prompt token, over some tokens or the whole vocabulary."""

    def compute(batch: Prompts) -> Tensor:
        return log_probabilities(last_logits(model, batch, vector, tokens=tokens))

    with torch.no_grad(), steady(model):
        return in_batches(prompts, compute, batch_size=batch_size, title=title, show=show)


def restricted(
    logits: Float[Tensor, "batch d_vocab"], tokens: Int[Tensor, " token"] | None
) -> Float[Tensor, "batch token"]:
    """Log-probabilities (at least float32), renormalised over `tokens` if given."""
    return log_probabilities(logits if tokens is None else logits[:, tokens.to(logits.device)])


def answer_space(model: TransformerBridge, task: Task) -> Int[Tensor, " token"]:
    """The first tokens of the labels, or of all answers where answers are open; distinct."""
    examples = task.examples + task.test_examples
    words = task.labels or dict.fromkeys(example.answer for example in examples)
    template = template_for(model, task.template)
    anchor = template.anchor
    firsts = [continuation_ids(model, anchor, template.answer(word))[0] for word in words]
    distinct = list(dict.fromkeys(firsts))
    if task.labels and len(distinct) < len(firsts):
        shared = [w for w, first in zip(words, firsts, strict=True) if firsts.count(first) > 1]
        raise InvalidInput(
            f"The labels {', '.join(map(repr, shared))} share a first token, so a distribution "
            "over labels is meaningless; rename them, or use over='vocabulary'."
        )
    return torch.tensor(distinct)
