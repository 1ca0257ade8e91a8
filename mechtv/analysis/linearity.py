"""How nearly linear is a vector's effect? The battery of docs/analyses.md.

Every part compares an effect on the residual stream behind the last block with a prediction that
would be right if the model were linear:

- *scaling*: the effect of alpha theta, with alpha times the effect of theta;
- *first order*: the effect of theta, with J_x(0) theta, J_x(theta) theta, the mean of
  J_x(alpha theta) theta over the path (which is exact up to the quadrature), and the mean effect on
  other queries (of training; of validation if training is scored), the same for every query;
- *superposition*: the effect of a sum, with the sum of the effects.

All of it is done for random vectors of theta's norm as well: a model may be more linear in the one
than in the others.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.analysis.linearity_battery import Battery, Probe, Values
from mechtv.analysis.perturbations import working
from mechtv.analysis.subject import Subject, random_like
from mechtv.errors import InvalidInput
from mechtv.evaluation.intervals import Estimate, mean, mean_share
from mechtv.evaluation.provenance import UNKNOWN, Provenance
from mechtv.evaluation.seeds import common_seed, seed_for
from mechtv.seeds import torch_rng
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import SplitName, Task
from mechtv.vectors.vector import TaskVector

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5)


@dataclass(frozen=True, kw_only=True)
class Score:
    """One number of the battery.

    Args:
        part: `scaling`, `first order` or `superposition`.
        name: what was predicted or run; `alpha` its factor, if in `scaling`.
        vector: `theta`, or `random` for the mean over the draws.
        score: `accuracy, ...` and `log-probability` of the answers; or how well the prediction
            meets the effect: `norm ratio` (the effect's norm over the prediction's), `cosine`, `R²`
            (against no effect) and `R² about the mean` (against the mean effect). `relative norm`
            is the effect's norm over that of theta's effect.
    """

    part: str
    name: str
    alpha: float | None
    vector: str
    score: str
    estimate: Estimate


@dataclass(frozen=True, kw_only=True, eq=False)
class Linearity:
    """The battery of one vector, and of random ones of its norm.

    Args:
        nodes: points of the path average; `n_null` how many random vectors.
        n: how many queries of `split`; the mean shift comes from `n_others` others.
        centred: whether norms and cosines are of centred vectors (under LayerNorm).
    """

    task: str
    layer: int
    scores: tuple[Score, ...]
    nodes: int
    n_null: int
    n: int
    n_others: int
    split: str
    centred: bool
    provenance: Provenance = UNKNOWN

    def table(self) -> pd.DataFrame:
        """One row a score: value, 95 % interval over queries, n."""
        about = {"task": self.task, "layer": self.layer, "split": self.split}
        return pd.DataFrame(
            about
            | {"part": s.part, "name": s.name, "alpha": _number(s.alpha), "vector": s.vector}
            | {"score": s.score, "value": s.estimate.value}
            | {"low": s.estimate.low, "high": s.estimate.high, "n": s.estimate.n}
            | self.provenance.columns()
            for s in self.scores
        )

    def estimate(
        self, part: str, name: str, score: str, *, alpha: float | None = None, vector: str = "theta"
    ) -> Estimate:
        """One number by its names.

        Raises:
            InvalidInput: if there is none.
        """
        for s in self.scores:
            if (s.part, s.name, s.score, s.alpha, s.vector) == (part, name, score, alpha, vector):
                return s.estimate
        raise InvalidInput(
            f"There is no {score!r} of {name!r} in {part!r} for {vector!r} at alpha={alpha}; "
            "table() lists all that there is."
        )


def linearity(
    model: TransformerBridge,
    task: Task,
    vector: TaskVector,
    *,
    alphas: Sequence[float] = ALPHAS,
    other: TaskVector | None = None,
    nodes: int = 8,
    n_null: int = 3,
    n: int | None = None,
    split: SplitName = "test",
    seed: int | None = None,
    progress: bool | None = None,
) -> Linearity:
    """How nearly linear a vector's effect is, in three ways (docs/analyses.md).

    Args:
        alphas: the factors of the scaling part; the effect of theta itself is measured anyway.
        other: the second vector of the superposition, added at the same place. If None, theta is
            cut into two random orthogonal parts of equal norm, whose sum it is.
        nodes: Gauss-Legendre points of the path average.
        n_null: random vectors of theta's norm; 0 for none.
        n: how many zero-shot queries of `split`; all if None.
        seed: whose splits are used, and what random vectors are drawn; the vector's own if None.

    Raises:
        InvalidInput: unless each vector adds one nonzero value before one block at the last token;
            for no alphas, or numbers that cannot be.
    """
    _check(alphas, n_null)
    subject = Subject.of(model, vector)
    theta, second = working(model, subject.theta), _second(model, subject, other)
    if seed is None:
        seed = seed_for(vector) if other is None else common_seed([vector, other])
    prompts = Prompts.of(model, task, split=split, n=n, seed=seed)
    others: SplitName = "validation" if split == "train" else "train"
    n_others = min(len(prompts), len(getattr(task.splits(seed), others)))
    rng = torch_rng(seed, f"random vectors of linearity, {task.name}")
    centred = subject.is_centred(model)
    probes = [Probe.of(theta, second, rng, centred=centred)]
    for null in random_like(theta, n_null, rng, centred=centred):
        null_second = None if second is None else random_like(second, 1, rng, centred=centred)[0]
        probes.append(Probe.of(null, null_second, rng, centred=centred))
    battery = Battery(
        model=model,
        prompts=prompts,
        others=Prompts.of(model, task, split=others, n=n_others, seed=seed),
        subject=subject,
        alphas=tuple(map(float, alphas)),
        nodes=nodes,
    )
    values = battery.of(probes, progress=progress)
    scores = [*_scores("theta", values[:1]), *_scores("random", values[1:])]
    return Linearity(
        task=task.name,
        layer=subject.layer,
        scores=tuple(scores),
        nodes=nodes,
        n_null=n_null,
        n=len(prompts),
        n_others=n_others,
        split=split,
        centred=centred,
        provenance=Provenance.of(model, task, seed),
    )


def _scores(vector: str, draws: Sequence[Values]) -> Iterator[Score]:
    """The mean over queries and draws; intervals are over queries."""
    for key in draws[0] if draws else ():
        found = np.stack([draw[key] for draw in draws if key in draw], axis=1)
        estimate = mean_share(found) if found.dtype == bool else mean(found.mean(axis=1))
        part, name, alpha, score = key
        yield Score(
            part=part, name=name, alpha=alpha, vector=vector, score=score, estimate=estimate
        )


def _number(alpha: float | None) -> float:
    return math.nan if alpha is None else alpha


def _second(
    model: TransformerBridge, subject: Subject, other: TaskVector | None
) -> Float[Tensor, " d_model"] | None:
    """What is added to theta in the superposition, if it is given."""
    if other is None:
        return None
    found = Subject.of(model, other)
    if found.layer != subject.layer:
        raise InvalidInput(
            f"other is added at block {found.layer}, the vector at block {subject.layer}; "
            "superposition needs two vectors at one place."
        )
    return working(model, found.theta)


def _check(alphas: Sequence[float], n_null: int) -> None:
    if not alphas or not all(math.isfinite(alpha) for alpha in alphas):
        raise InvalidInput(f"alphas={alphas!r} are no factors; give one or more finite numbers.")
    if len(set(alphas)) < len(alphas):
        raise InvalidInput(f"alphas={alphas!r} name a factor twice; give each once.")
    if n_null < 0:
        raise InvalidInput(f"n_null={n_null} is negative; use 0 (no random vectors) or more.")
