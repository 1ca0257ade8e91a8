"""The logit lens: the final norm, then the unembedding, on any state or vector.

The norm is recomputed on the state itself (docs/analyses.md). Here are the tokens that vectors
favour and the scores of given states; `logit_lens` gets the states of a run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pandas as pd
import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.analysis.answers import Answers
from mechtv.errors import InvalidInput
from mechtv.evaluation.intervals import Estimate, intervals_of_means, share
from mechtv.forward.setting import device_of
from mechtv.forward.unembed import unembedded
from mechtv.tasks.prompts import Prompts
from mechtv.vectors.vector import TaskVector

ROWS = 64  # queries whose logits are held at once
FULL, LABELS = "accuracy, full vocabulary", "accuracy, label-restricted"
Token = tuple[str, float]
"""A token as text, and its logit."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Readings:
    """The lens's scores of one run, at each depth.

    Args:
        correct: the answer's first token is the most probable one; `correct_label` among the
            labels' first tokens (None for open answers).
        log_probability: of the answer's first token, natural log.
        logit_difference: its logit minus the mean logit of its rivals, the same at every depth.
        rank: its place among all tokens; 1 is the most probable.
    """

    correct: Bool[np.ndarray, "depth query"]
    correct_label: Bool[np.ndarray, "depth query"] | None
    log_probability: Float[np.ndarray, "depth query"]
    logit_difference: Float[np.ndarray, "depth query"]
    rank: Int[np.ndarray, "depth query"]

    def estimates(self) -> dict[str, list[Estimate]]:
        """Each score at each depth, with its 95 % interval.

        Of ranks it is the mean log10, so that no single query decides: 0 is the top.
        """
        found = {FULL: [share(hits) for hits in self.correct]}
        if self.correct_label is not None:
            found[LABELS] = [share(hits) for hits in self.correct_label]
        found["log-probability"] = means(self.log_probability)
        found["logit difference"] = means(self.logit_difference)
        found["log10 rank"] = means(np.log10(self.rank))
        return found

    def rows(self) -> list[dict[str, object]]:
        """One entry a (score, depth): value, 95 % interval, n."""
        return [
            row
            for score, estimates in self.estimates().items()
            for row in rows_of(score, estimates)
        ]

    def behind(self, other: "Readings", depth: int) -> "Readings":
        """These readings, which begin at a depth, behind those of another run up to there."""
        joined: dict[str, Any] = {}
        for name in (f.name for f in fields(self)):
            before, later = getattr(other, name), getattr(self, name)
            joined[name] = None if later is None else np.concatenate([before[:depth], later])
        return Readings(**joined)


def lens_logits(
    model: TransformerBridge, states: Float[Tensor, "state d_model"]
) -> Float[Tensor, "state d_vocab"]:
    """The logits that each state would give if it stood before the final norm."""
    weight = next(model.unembed.parameters())
    with torch.no_grad():
        return unembedded(model, states.to(weight.device, weight.dtype)[None])[0]


def best_tokens(
    model: TransformerBridge, states: Float[Tensor, "state d_model"], k: int
) -> list[list[Token]]:
    """The `k` tokens with the largest logits of each state, the largest first.

    Raises:
        InvalidInput: if `k` is not between 1 and the size of the vocabulary.
    """
    if not 1 <= k <= model.cfg.d_vocab:
        raise InvalidInput(f"k={k} tokens cannot be shown; use 1 to {model.cfg.d_vocab}.")
    best = lens_logits(model, states).topk(k, dim=-1)
    return [
        [(model.tokenizer.decode([token]), logit) for token, logit in zip(ids, logits, strict=True)]
        for ids, logits in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def top_tokens(model: TransformerBridge, vector: TaskVector, *, k: int = 8) -> pd.DataFrame:
    """The `k` most favoured tokens of each of a vector's values in the residual stream.

    Returns:
        One row a (layer, position, rank): the token as text, and its logit.

    Raises:
        InvalidInput: if the vector has no value that lives in the residual stream, or for a `k`
            that is no number of tokens.
    """
    rows = []
    for edit in vector.edits:
        value = edit.operation.tensors().get("value")
        if value is None or edit.site.component == "z":
            continue
        states = rearrange(value.detach(), "... d_model -> (...) d_model")
        places = edit.site.positions if value.ndim == 2 else (str(edit.site.positions),)
        for place, best in zip(places, best_tokens(model, states, k), strict=True):
            rows += [
                {
                    "layer": edit.site.layer,
                    "position": place,
                    "rank": rank,
                    "token": token,
                    "logit": logit,
                }
                for rank, (token, logit) in enumerate(best, start=1)
            ]
    if not rows:
        raise InvalidInput(f"{vector} has no value in the residual stream to read with the lens.")
    return pd.DataFrame(rows)


def lens_of(
    model: TransformerBridge,
    vectors: Mapping[str, Float[Tensor, " d_model"] | TaskVector],
    *,
    k: int = 10,
) -> pd.DataFrame:
    """The `k` most favoured tokens of named vectors, such as theta, Q theta and W theta.

    The decoded tokens of "Task Vectors, Learned Not Extracted" (docs/analyses.md).

    Args:
        vectors: each a vector of the residual stream, or a task vector with one such value.

    Returns:
        One row a (vector, rank): the token as text, and its logit.

    Raises:
        InvalidInput: for no vectors, one of another width, or a `k` that is no number of tokens.
    """
    names, states = named_states(model, vectors)
    return pd.DataFrame(
        {"vector": name, "rank": rank, "token": token, "logit": logit}
        for name, best in zip(names, best_tokens(model, states, k), strict=True)
        for rank, (token, logit) in enumerate(best, start=1)
    )


def named_states(
    model: TransformerBridge, vectors: Mapping[str, Float[Tensor, " d_model"] | TaskVector]
) -> tuple[tuple[str, ...], Float[Tensor, "vector d_model"]]:
    """The names of vectors, and the vectors as one tensor on the model's device.

    Raises:
        InvalidInput: for no vectors, or one that is not `d_model` finite numbers.
    """
    if not vectors:
        raise InvalidInput('There are no vectors; give at least one by name, as {"theta": theta}.')
    states = []
    for name, vector in vectors.items():
        value = _stream_value(name, vector) if isinstance(vector, TaskVector) else vector
        if tuple(value.shape) != (model.cfg.d_model,):
            raise InvalidInput(
                f"{name!r} has the shape {tuple(value.shape)}; this model's residual stream takes "
                f"vectors of shape ({model.cfg.d_model},)."
            )
        if not bool(value.isfinite().all()):
            raise InvalidInput(f"{name!r} holds numbers that are not finite; give finite ones.")
        states.append(value.detach().to(device_of(model), torch.float64))
    return tuple(vectors), torch.stack(states)


def _stream_value(name: str, vector: TaskVector) -> Tensor:
    """A vector's one value in the residual stream."""
    value = vector.edits[0].operation.tensors().get("value")
    inside = vector.edits[0].site.component != "z"
    if len(vector.edits) > 1 or value is None or not inside or value.numel() != value.shape[-1]:
        raise InvalidInput(
            f"{name!r} is {vector}; give a vector with one value in the residual stream, or that "
            "value itself."
        )
    return value.reshape(-1)


def read(
    model: TransformerBridge,
    states: Float[Tensor, "query depth d_model"],
    prompts: Prompts,
    against: Int[Tensor, "query rival"],
) -> Readings:
    """The lens's scores of states.

    Args:
        against: each answer's rivals, at every depth the same.
    """
    parts = [
        _read(model, states[rows], prompts.select(rows.tolist()), against[rows])
        for rows in torch.arange(len(prompts)).split(ROWS)
    ]
    joined: dict[str, Any] = {}
    for name in (f.name for f in fields(Readings)):
        some = [getattr(part, name) for part in parts]
        joined[name] = None if some[0] is None else np.concatenate(some, axis=1)
    return Readings(**joined)


def means(values: Float[np.ndarray, "depth query"]) -> list[Estimate]:
    """The mean over queries at each depth, with its 95 % bootstrap interval."""
    low, high = intervals_of_means(values)
    return [
        Estimate(value=float(v), low=float(a), high=float(b), n=values.shape[1])
        for v, a, b in zip(values.mean(axis=1), low, high, strict=True)
    ]


def rows_of(score: str, estimates: Sequence[Estimate], first: int = 0) -> list[dict[str, object]]:
    """The rows of a table for a score at each depth from `first` on."""
    return [
        {"depth": d, "score": score, "value": e.value, "low": e.low, "high": e.high, "n": e.n}
        for d, e in enumerate(estimates, start=first)
    ]


def _read(
    model: TransformerBridge,
    states: Float[Tensor, "query depth d_model"],
    prompts: Prompts,
    against: Int[Tensor, "query rival"],
) -> Readings:
    answers, ranks = [], []
    for depth in range(states.shape[1]):
        logits = lens_logits(model, states[:, depth])
        own = logits.gather(1, prompts.first_answer_tokens.to(logits.device)[:, None])
        answers.append(Answers.of(logits, prompts, against))
        ranks.append(1 + (logits > own).sum(dim=1).cpu().numpy())
    hits = [a.correct_label for a in answers if a.correct_label is not None]
    return Readings(
        correct=np.stack([a.correct for a in answers]),
        correct_label=np.stack(hits) if hits else None,
        log_probability=np.stack([a.log_probability for a in answers]),
        logit_difference=np.stack([a.logit_difference for a in answers]),
        rank=np.stack(ranks),
    )
