"""What logits at the last token say of the answers: hits, log-probability, logit difference.

Analyses score the answer's first token, at the prompt's last one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import UnknownName
from mechtv.evaluation.intervals import Estimate, mean, share
from mechtv.forward.run import in_batches, last_logits, log_probabilities, wide
from mechtv.forward.unembed import logit_factor
from mechtv.tasks.prompts import Prompts
from mechtv.vectors.vector import TaskVector


@dataclass(frozen=True, kw_only=True, eq=False)
class Answers:
    """Scores of each query's first answer token.

    Args:
        correct: it is the most probable token of all; `correct_label` of the labels' first ones
            (None for open answers).
        log_probability: natural log.
        logit_difference: its logit minus the mean logit of its rivals (see `rivals`).
    """

    correct: Bool[np.ndarray, " query"]
    correct_label: Bool[np.ndarray, " query"] | None
    log_probability: Float[np.ndarray, " query"]
    logit_difference: Float[np.ndarray, " query"]

    @classmethod
    def of(
        cls,
        logits: Float[Tensor, "query d_vocab"],
        prompts: Prompts,
        against: Int[Tensor, "query rival"] | None = None,
    ) -> "Answers":
        """Read logits of the whole vocabulary.

        Args:
            against: each query's rivals; those that these logits show if None.
        """
        answers = prompts.first_answer_tokens.to(logits.device)
        against = rivals(logits, prompts) if against is None else against.to(logits.device)
        log_p = log_probabilities(logits).gather(1, answers[:, None])[:, 0]
        own = logits.gather(1, answers[:, None])[:, 0].double()
        correct_label = None
        if prompts.labels:
            labels = prompts.first_label_tokens.to(logits.device)
            hits = labels[logits[:, labels].argmax(dim=1)] == answers
            correct_label = hits.cpu().numpy()
        return cls(
            correct=(logits.argmax(dim=1) == answers).cpu().numpy(),
            correct_label=correct_label,
            log_probability=log_p.double().cpu().numpy(),
            logit_difference=(own - logits.gather(1, against).double().mean(dim=1)).cpu().numpy(),
        )

    def scores(self) -> dict[str, Shaped[np.ndarray, " query"]]:
        """Each score by name, query by query: of accuracies whether it is a hit."""
        found: dict[str, np.ndarray] = {"accuracy, full vocabulary": self.correct}
        if self.correct_label is not None:
            found["accuracy, label-restricted"] = self.correct_label
        found["log-probability"] = self.log_probability
        found["logit difference"] = self.logit_difference
        return found

    def values(self, score: str) -> Shaped[np.ndarray, " query"]:
        """One score, query by query.

        Raises:
            UnknownName: if there is none of that name, such as label-restricted accuracy of open
                answers.
        """
        known = self.scores()
        if score not in known:
            raise UnknownName("score", score, known)
        return known[score]

    def estimates(self) -> dict[str, Estimate]:
        """Each score with its 95 % interval, by name."""
        return {
            name: share(values) if values.dtype == bool else mean(values)
            for name, values in self.scores().items()
        }

    def columns(self) -> Float[Tensor, "query score"]:
        """The four scores as numbers in one tensor, which `of_columns` reads back.

        Label hits of open answers are NaN.
        """
        label = self.correct_label
        missing = np.full(len(self.correct), np.nan)
        columns = (
            self.correct,
            missing if label is None else label,
            self.log_probability,
            self.logit_difference,
        )
        return torch.from_numpy(np.stack(columns, axis=1).astype(float))

    @classmethod
    def of_columns(cls, columns: Float[Tensor, "query score"], *, closed: bool) -> "Answers":
        """The answers behind what `columns` gave.

        Args:
            closed: whether they have labels.
        """
        correct, label, log_probability, logit_difference = columns.numpy().T
        return cls(
            correct=correct.astype(bool),
            correct_label=label.astype(bool) if closed else None,
            log_probability=log_probability,
            logit_difference=logit_difference,
        )

    def table(self) -> pd.DataFrame:
        """One row a score: value, 95 % interval, n."""
        return pd.DataFrame(
            {"score": name, "value": e.value, "low": e.low, "high": e.high, "n": e.n}
            for name, e in self.estimates().items()
        )


def rivals(logits: Float[Tensor, "query d_vocab"], prompts: Prompts) -> Int[Tensor, "query rival"]:
    """What each answer stands against: the other labels' first tokens, or the best wrong token."""
    answers = prompts.first_answer_tokens.to(logits.device)
    if len(prompts.labels) > 1:
        labels = prompts.first_label_tokens.to(logits.device)
        others = labels[None, :].expand(len(answers), -1)
        return others[others != answers[:, None]].reshape(len(answers), -1)
    wrong = logits.scatter(1, answers[:, None], -torch.inf)
    return wrong.argmax(dim=1, keepdim=True)


def fixed_rivals(
    model: TransformerBridge, prompts: Prompts, vector: TaskVector | None = None
) -> Callable[[Prompts], Int[Tensor, "query rival"]]:
    """Each query's rivals in one run, for any of its rows: so that other runs are compared by them.

    Args:
        vector: what the run is under; None for the plain one.
    """
    with torch.no_grad():
        found = in_batches(
            prompts, lambda batch: rivals(last_logits(model, batch, vector), batch), show=False
        )
    place = {(e.key, e.answer): number for number, e in enumerate(prompts.examples)}
    return lambda rows: found[[place[e.key, e.answer] for e in rows.examples]]


def contrast(
    model: TransformerBridge, prompts: Prompts, against: Int[Tensor, "query rival"]
) -> Float[Tensor, "query d_model"]:
    """The direction, behind the final norm, that is the logit difference before any soft cap.

    At least float32: a difference of weights of a short type is no number of that type.
    """
    unembedding = model.W_U.detach()
    answers = prompts.first_answer_tokens.to(unembedding.device)
    wrong = wide(unembedding[:, against.to(unembedding.device)]).mean(dim=2)
    return logit_factor(model) * (wide(unembedding[:, answers]) - wrong).T
