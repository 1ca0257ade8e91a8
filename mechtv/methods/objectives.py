"""What a learned vector is trained for: three objectives behind one interface.

Each is made once for a set of queries (so that targets are computed once) and then gives the loss
of a vector on some of their rows. A new objective is one class, and one line where `learned`
chooses.
"""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.evaluation.accuracy import (
    answer_log_probability,
    answer_places,
    score_columns,
)
from mechtv.evaluation.dntp import (
    Over,
    answer_space,
    kl_divergence,
    next_token_log_probabilities,
)
from mechtv.forward.run import capture, in_batches, kept, last_logits, log_probabilities, wide
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import Task
from mechtv.vectors.site import Site
from mechtv.vectors.vector import TaskVector


@runtime_checkable  # the tests check arguments against it
class Objective(Protocol):
    """The loss of a vector on some rows of `prompts`."""

    prompts: Prompts

    def prepared(self, vector: TaskVector, show: bool | None) -> AbstractContextManager[None]:
        """Inside, the prompts have run once, for vectors with edits where this one has them."""
        ...

    def loss(self, vector: TaskVector, rows: Int[Tensor, " row"]) -> Float[Tensor, " row"]:
        """One loss a row; lower is better. Differentiable in the vector's values."""
        ...

    def score(self, vector: TaskVector) -> dict[str, float]:
        """`validation_loss` over all rows; `validation_accuracy` too where answers are trained."""
        ...


class Answer:
    """-log p(answer), the mean over the answer's tokens (*Learned*, section 3)."""

    def __init__(self, model: TransformerBridge, prompts: Prompts) -> None:
        self.model = model
        self.prompts = replace(prompts, labels=(), label_tokens=())  # labels are not scored
        self._forced = self.prompts.with_answers()

    def prepared(self, vector: TaskVector, show: bool | None) -> AbstractContextManager[None]:
        """With the answers behind the prompts."""
        places = answer_places(self._forced)
        return kept(self.model, self._forced, vector, places=places, stays=True, show=show)

    def loss(self, vector: TaskVector, rows: Int[Tensor, " row"]) -> Float[Tensor, " row"]:
        """The cross-entropy of each row's answer."""
        batch = self._forced.select(rows.tolist())
        return -answer_log_probability(self.model, batch, vector)

    def score(self, vector: TaskVector) -> dict[str, float]:
        """The mean loss, and the share of answers that greedy decoding gets wholly right."""
        with torch.no_grad():
            columns = in_batches(
                self.prompts, lambda batch: score_columns(self.model, batch, vector), show=False
            )
        _, _, exact, log_probability, _ = columns.mean(dim=0).tolist()
        return {"validation_loss": -log_probability, "validation_accuracy": exact}


class MatchDistribution:
    """KL(P_icl || P_vector) at the last prompt token: dNTP as a training objective, no answers."""

    def __init__(
        self,
        model: TransformerBridge,
        prompts: Prompts,
        in_context: Prompts,
        task: Task,
        over: Over,
    ) -> None:
        self.model, self.prompts = model, prompts
        self.tokens = answer_space(model, task) if over == "labels" else None
        self.target = next_token_log_probabilities(model, in_context, None, self.tokens)

    def prepared(self, vector: TaskVector, show: bool | None) -> AbstractContextManager[None]:
        """The prompts alone."""
        return kept(self.model, self.prompts, vector, stays=True, show=show)

    def loss(self, vector: TaskVector, rows: Int[Tensor, " row"]) -> Float[Tensor, " row"]:
        """The divergence of each row, in nats."""
        batch = self.prompts.select(rows.tolist())
        given = log_probabilities(last_logits(self.model, batch, vector, tokens=self.tokens))
        return kl_divergence(self.target[rows.to(given.device)], given)

    def score(self, vector: TaskVector) -> dict[str, float]:
        """The mean divergence."""
        return _mean_loss(self, vector)


class MatchState:
    """Mean squared distance to the in-context state at the last token of one layer."""

    def __init__(
        self, model: TransformerBridge, prompts: Prompts, in_context: Prompts, layer: int
    ) -> None:
        self.model, self.prompts = model, prompts
        self.site = Site(component="resid_post", layer=layer)
        with torch.no_grad():
            self.target = in_batches(in_context, lambda batch: self._state(batch, None), show=False)

    def prepared(self, vector: TaskVector, show: bool | None) -> AbstractContextManager[None]:
        """The prompts alone, up to the state."""
        return kept(self.model, self.prompts, vector, sites=[self.site], stays=True, show=show)

    def loss(self, vector: TaskVector, rows: Int[Tensor, " row"]) -> Float[Tensor, " row"]:
        """The mean squared difference of each row, over the width."""
        state = self._state(self.prompts.select(rows.tolist()), vector)
        return (state - self.target[rows.to(state.device)]).square().mean(dim=-1)

    def score(self, vector: TaskVector) -> dict[str, float]:
        """The mean squared distance."""
        return _mean_loss(self, vector)

    def _state(self, batch: Prompts, vector: TaskVector | None) -> Float[Tensor, "batch d_model"]:
        state = capture(self.model, batch, [self.site], vector)[self.site][:, 0]
        return wide(state)


def _mean_loss(objective: Objective, vector: TaskVector, batch_size: int = 64) -> dict[str, float]:
    with torch.no_grad():
        rows = torch.arange(len(objective.prompts)).split(batch_size)
        losses = torch.cat([objective.loss(vector, some) for some in rows])
    return {"validation_loss": float(losses.cpu().double().mean())}
