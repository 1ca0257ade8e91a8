"""Which heads a vector's effect needs, ranked from one backward pass or by ablating each alone.

*Key heads* of "Task Vectors, Learned Not Extracted" (ICLR 2026); docs/analyses.md. Saliency is
the first-order estimate of what zeroing a head's output at the last token would take from the
answer; ablation is the truth that it stands for, one head at a time. Only heads of the blocks at or
behind the vector's are ranked: those before it never see the vector.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy import stats
from transformer_lens.model_bridge import TransformerBridge

from mechtv.analysis.circuits import Head
from mechtv.analysis.head_importance import Score, drops, saliencies
from mechtv.analysis.head_outputs import Mode, training_prompts
from mechtv.analysis.subject import Subject
from mechtv.errors import InvalidInput
from mechtv.evaluation.intervals import LEVEL, RESAMPLES, Estimate, intervals_of_means
from mechtv.evaluation.provenance import UNKNOWN, Provenance
from mechtv.evaluation.seeds import seed_for
from mechtv.methods.head_effects import n_chosen, ranked
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import SplitName, Task
from mechtv.vectors.vector import TaskVector

By = Literal["saliency", "ablation"]
Change = Literal["absolute", "signed"]


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadRanking:
    """How much the answer depends on each head's output at the last token, query by query.

    Args:
        layer: the block at whose input the vector is added, and the first whose heads are ranked.
        by: `saliency` or `ablation`; `mode` how heads were ablated (None for saliency).
        score: of the answer's first token, what changes: `probability` or `log-probability` (nats).
        change: what the ranking goes by: the mean over queries of the `absolute` change, or of the
            `signed` one.
        queries: the prompts' queries, in order.
        per_query: the change itself, positive where the head's output helps the answer: the drop
            when it is ablated, or its first-order estimate.
    """

    task: str
    layer: int
    by: By
    mode: Mode | None
    score: Score
    change: Change
    split: str
    queries: tuple[tuple[str, ...], ...]
    per_query: Float[np.ndarray, "layer head query"]
    provenance: Provenance = UNKNOWN

    @property
    def importance(self) -> Float[np.ndarray, "layer head"]:
        """What heads are ranked by; the first row is that of block `layer`."""
        mean: Float[np.ndarray, "layer head"] = self._ranked_values().mean(axis=-1)
        return mean

    @property
    def measure(self) -> str:
        """What is ranked, in words."""
        kind = "" if self.change == "signed" else "absolute "
        what = "saliency for" if self.by == "saliency" else f"drop ({self.mode} ablation) of"
        return f"mean {kind}{what} the answer's {self.score}"

    def top(self, how_many: int | float) -> tuple[Head, ...]:
        """The key heads as (layer, head), strongest first.

        Args:
            how_many: a count (12), or a share between 0 and 1 (0.1) of the heads at or behind the
                vector's block, rounded up.

        Raises:
            InvalidInput: for a count below 1 or above the number of these heads, or another share.
        """
        return self._order()[: n_chosen(how_many, self.importance.size)]

    def table(self) -> pd.DataFrame:
        """One row a head: value, 95 % bootstrap interval over queries, n, and rank (1 is first)."""
        low, high = intervals_of_means(self._ranked_values())
        rank = {head: place for place, head in enumerate(self._order(), start=1)}
        about = {"task": self.task, "injection layer": self.layer, "measure": self.measure}
        return pd.DataFrame(
            about
            | {
                "split": self.split,
                "layer": self.layer + row,
                "head": head,
                "value": float(value),
                "low": float(low[row, head]),
                "high": float(high[row, head]),
                "n": len(self.queries),
                "rank": rank[self.layer + row, head],
            }
            | self.provenance.columns()
            for (row, head), value in np.ndenumerate(self.importance)
        )

    def histogram(self, how_many: int | float = 0.1) -> pd.DataFrame:
        """One row a layer at or behind the vector's: how many of its heads are key heads.

        Args:
            how_many: as in `top`.
        """
        layers = [layer for layer, _ in self.top(how_many)]
        n_layers, n_heads = self.importance.shape
        return pd.DataFrame(
            {"task": self.task, "injection layer": self.layer, "layer": layer}
            | {"key_heads": layers.count(layer), "n_heads": n_heads}
            | self.provenance.columns()
            for layer in range(self.layer, self.layer + n_layers)
        )

    def compare(self, other: "HeadRanking") -> Estimate:
        """Spearman's rank correlation with another ranking, over the heads that both rank.

        The interval is from resampled heads (2,000 times, fixed seed); n counts heads.

        Raises:
            InvalidInput: if they are of two models.
        """
        first = max(self.layer, other.layer)
        pairs = [one.importance[first - one.layer :] for one in (self, other)]
        models = [(one.provenance.model, one.provenance.revision) for one in (self, other)]
        if pairs[0].shape != pairs[1].shape or models[0] != models[1]:
            raise InvalidInput(
                f"These rankings are of the heads of two models ({models[0][0]}, {models[1][0]}); "
                "compare those of one."
            )
        return _spearman(pairs[0].ravel(), pairs[1].ravel())

    def _ranked_values(self) -> Float[np.ndarray, "layer head query"]:
        return self.per_query if self.change == "signed" else np.abs(self.per_query)

    def _order(self) -> tuple[Head, ...]:
        return tuple((self.layer + row, head) for row, head in ranked(self.importance))


def rank_heads(
    model: TransformerBridge,
    task: Task,
    vector: TaskVector,
    *,
    by: By = "saliency",
    score: Score = "probability",
    change: Change = "absolute",
    mode: Mode = "mean",
    n_train: int = 100,
    n: int | None = None,
    split: SplitName = "validation",
    seed: int | None = None,
    progress: bool | None = None,
) -> HeadRanking:
    """Rank the heads at or behind a vector's block, on the injected zero-shot run.

    Saliency of a head with output a (before W_O, at the last token) is sum_d a_d dp(y)/da_d, for
    all heads from one backward pass. Ablation replaces the output of each head alone.

    Args:
        by: `saliency`, or `ablation` (exhaustive: one pass over the last token for each head).
        score: whose change is taken: p(y) of the answer's first token, or log p(y).
        change: rank by the mean over queries of the `absolute` change (the paper's), or of the
            `signed` one: then heads that work against the answer come last.
        mode: of ablation: `mean` (over training queries) or `zero`; see `ablate_heads`.
        n_train: how many training queries `mean` is over; fewer if the split is smaller.
        n: how many queries; the whole split if None.
        split: by default validation, so that key heads can be tested on the test split.
        seed: fixes the splits; that of the vector if None.

    Raises:
        InvalidInput: for a vector that is not one value added at the last token, or an option that
            cannot be.
    """
    options = {"by": (by, By), "score": (score, Score), "change": (change, Change)}
    for name, (value, allowed) in options.items():
        if value not in get_args(allowed):
            raise InvalidInput(
                f"{name}={value!r} is unknown; use {' or '.join(get_args(allowed))}."
            )
    if mode not in ("mean", "zero"):
        raise InvalidInput(f"mode={mode!r} does not rank heads; use mean or zero.")
    layer = Subject.of(model, vector).layer
    seed = seed_for(vector) if seed is None else seed
    prompts = Prompts.of(model, task, split=split, n=n, seed=seed)
    layers = range(layer, model.cfg.n_layers)
    if by == "saliency":
        per_query = saliencies(model, prompts, vector, layers, score, progress)
    else:
        source = training_prompts(model, task, n_train, seed)
        per_query = drops(model, prompts, source, vector, layers, score, mode, progress)
    return HeadRanking(
        task=task.name,
        layer=layer,
        by=by,
        mode=mode if by == "ablation" else None,
        score=score,
        change=change,
        split=split,
        queries=tuple(example.key for example in prompts.examples),
        per_query=per_query.numpy(),
        provenance=Provenance.of(model, task, seed),
    )


def _spearman(x: Float[np.ndarray, " head"], y: Float[np.ndarray, " head"]) -> Estimate:
    """With one value only there is no correlation: NaN; such resamples are left out."""
    chosen = np.random.default_rng(0).integers(0, len(x), (RESAMPLES, len(x)))
    chosen = np.concatenate([np.arange(len(x))[None], chosen])
    first, second = (stats.rankdata(values[chosen], axis=1) for values in (x, y))
    first, second = (ranks - ranks.mean(axis=1, keepdims=True) for ranks in (first, second))
    scale = np.sqrt((first**2).sum(axis=1) * (second**2).sum(axis=1))
    scale[scale == 0] = np.nan
    found = (first * second).sum(axis=1) / scale
    if np.isnan(found[0]):
        return Estimate(value=np.nan, low=np.nan, high=np.nan, n=len(x))
    low, high = np.nanquantile(found[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value=float(found[0]), low=float(low), high=float(high), n=len(x))
