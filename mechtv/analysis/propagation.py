"""Whether a vector travels to the end of the model as through one matrix.

*Task Vectors, Learned Not Extracted* (ICLR 2026) fits W_l so that the change which a vector θ at
block l makes to the last token's residual stream behind the last block, averaged over queries, is
about W_l θ, on perturbed vectors (docs/analyses.md). What W is worth shows on perturbations that
it was not fitted to, and in the answers when W θ is added at the end instead of θ at block l.

Do not read a small `spread` as evidence: then W only has to map θ to its own mean effect, which is
nearly a tautology. The centred R² says whether the variation about θ maps as well.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.analysis.answers import Answers
from mechtv.analysis.final_states import answers_of
from mechtv.analysis.logit_lens import rivals_under
from mechtv.analysis.perturbations import mean_effects, perturbed
from mechtv.analysis.ridge import HeldOut, Ridge, fit_ridge
from mechtv.analysis.subject import Subject
from mechtv.errors import InvalidInput
from mechtv.evaluation.intervals import Estimate
from mechtv.evaluation.provenance import UNKNOWN, Provenance
from mechtv.evaluation.seeds import seed_for
from mechtv.forward.memory import steady
from mechtv.forward.run import wide
from mechtv.forward.variants import scan
from mechtv.seeds import torch_rng
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import SplitName, Task
from mechtv.vectors.vector import TaskVector

N_HELD_OUT = 128

ZERO_SHOT, FULL = "zero-shot", "theta at its layer"
MAPPED, MEAN_EFFECT = "W theta at the end", "mean effect at the end"


@dataclass(frozen=True, kw_only=True, eq=False)
class Propagation:
    """A fitted W, and how well it stands for the blocks from `layer` on.

    Args:
        matrix: W, in float64; a column vector at the input of block `layer` to one behind the last.
        bias: b of W θ + b; None without an intercept.
        rank: how many directions the perturbations span; W is 0 outside of them.
        spread: the perturbations' sizes, as shares of θ's norm.
        ridge: of the fit, in squared units of θ.
        n: training queries that each effect of the fit is averaged over; `n_held_out_queries` those
            of `split` behind each held-out effect.
        effect: θ's own effect, averaged over these queries.
        held_out: scores on held-out perturbations, with effects on queries of `split`;
            `same_queries` likewise on the queries of the fit.
        answers: for each setting the scores on queries of `split`; W theta is with b, if there is
            one.
        centred: whether scores are of centred vectors, as the model's norms see them (LayerNorm).
    """

    task: str
    layer: int
    theta: Float[Tensor, " d_model"]
    matrix: Float[Tensor, "d_model d_model"]
    bias: Float[Tensor, " d_model"] | None = None
    rank: int
    spread: tuple[float, ...]
    ridge: float
    n_perturbations: int
    n: int
    n_held_out_queries: int
    split: SplitName
    effect: Float[Tensor, " d_model"]
    held_out: HeldOut
    same_queries: HeldOut
    answers: dict[str, Answers]
    centred: bool = False
    name: str = "fitted"
    provenance: Provenance = UNKNOWN

    @property
    def is_map(self) -> bool:
        """Whether W is known in every direction, not only in the perturbations' span."""
        return self.rank == len(self.theta)

    @property
    def r2(self) -> Estimate:
        """R² on held-out perturbations and queries, counted from no effect."""
        return self.held_out.r2()

    @property
    def r2_centred(self) -> Estimate:
        """R² of the variation: y and its prediction each less their mean over the perturbations."""
        return self.held_out.r2(centred=True)

    @property
    def relative_error(self) -> float:
        """What W leaves of the effects' variation on its own queries, as a share of its norm."""
        return float(np.sqrt(max(0.0, 1 - self.same_queries.r2(centred=True).value)))

    def predict(self, vectors: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The effects that W (and b) gives to vectors, in float64 on the CPU."""
        product = vectors.cpu().double() @ self.matrix.T
        return product if self.bias is None else product + self.bias

    def describe(self) -> str:
        """What W is, in one sentence."""
        d_model = len(self.theta)
        if self.is_map:
            return f"a map of all {d_model} dimensions"
        return f"no map: known in {self.rank} of {d_model} dimensions, 0 in the others"

    def table(self) -> pd.DataFrame:
        """One row a score: of the map (n counts perturbations), of each setting (queries)."""
        about = {
            "task": self.task,
            "map": self.name,
            "layer": self.layer,
            "spread": " ".join(f"{size:g}" for size in self.spread),
            "ridge": self.ridge,
            "n_perturbations": self.n_perturbations,
            "n_queries": self.n,
            "n_held_out_queries": self.n_held_out_queries,
            "rank": self.rank,
            "is": self.describe(),
        }
        return pd.DataFrame(
            about
            | {"setting": setting, "queries": queries, "score": score}
            | {"value": e.value, "low": e.low, "high": e.high, "n": e.n}
            | self.provenance.columns()
            for setting, queries, score, e in self._scores()
        )

    def _scores(self) -> Iterator[tuple[str, str, str, Estimate]]:
        for queries, scores in ((self.split, self.held_out), ("train", self.same_queries)):
            for score, estimate in scores.estimates().items():
                yield "held-out perturbations", queries, score, estimate
        for setting, answers in self.answers.items():
            for score, estimate in answers.estimates().items():
                yield setting, self.split, score, estimate


def fit_propagation(
    model: TransformerBridge,
    task: Task,
    vector: TaskVector,
    *,
    spread: float | Sequence[float] = 0.1,
    n_perturbations: int | None = None,
    n_held_out: int = N_HELD_OUT,
    n: int = 32,
    n_scored: int | None = None,
    ridge: float | None = None,
    intercept: bool = False,
    span: bool = False,
    split: SplitName = "test",
    seed: int | None = None,
    progress: bool | None = None,
) -> Propagation:
    """Fit W to the mean effects of perturbed vectors, and score it (docs/analyses.md).

    *Task Vectors, Learned Not Extracted*: mean over x of h_final(x; θ_i) - h_final(x) ≈ W θ_i, with
    θ_i = θ + λ_i ‖θ‖ ε_i, ε_i a random direction, h_final the residual stream behind the last block
    at the last token. The paper leaves perturbations, queries and ridge open.

    Args:
        spread: λ, a share of θ's norm (centred under LayerNorm), from 0.01 to 1 in practice; of
            several, each perturbation takes the next in turn. A small one makes the claim nearly a
            tautology, since W then only has to map θ to its own mean effect; in bfloat16 it
            measures rounding.
        n_perturbations: how many W is fitted to; twice the model's width if None.
        n_held_out: further ones, for the scores.
        n: training queries that effects are averaged over, for the fit; held-out effects are also
            averaged over as many scoring queries. Fewer where the split is smaller.
        n_scored: scoring queries for the answers; the whole split if None.
        ridge: chosen by generalised cross-validation if None.
        intercept: fit W θ + b; then W says how the effect varies about θ, and b is not a map's.
        span: allow fewer perturbations than the model's width. W is then known in their span only,
            held-out perturbations are drawn there, and the result says so.
        split: where scoring queries come from.
        seed: of splits and perturbations; None for the vector's own.

    Raises:
        InvalidInput: for a vector that is not one value added at the last token, fewer
            perturbations than the width without `span`, or numbers outside their ranges.
    """
    subject = Subject.of(model, vector)
    seed = seed_for(vector) if seed is None else seed
    sizes = _spread(spread)
    count = 2 * len(subject.theta) if n_perturbations is None else n_perturbations
    _check(len(subject.theta) + intercept, count, n_held_out, n, span)
    fit_on, few, score_on = (
        Prompts.of(model, task, split=name, n=most, seed=seed)
        for name, most in (
            ("train", min(n, len(task.split("train", seed=seed)))),
            (split, min(n, len(task.split(split, seed=seed)))),
            (split, n_scored),
        )
    )
    # Sizes are shares of the norm that the model's norms see.
    seen = float(subject.as_seen(model, subject.theta).norm() / subject.theta.norm())
    steps = tuple(size * seen for size in sizes)
    fitted = perturbed(subject.theta, steps, count, torch_rng(seed, "perturbed vectors"))
    with torch.no_grad(), steady(model):
        theta = wide(subject.theta)[None]
        effects = mean_effects(model, fit_on, subject, torch.cat([theta, fitted]), progress)
        found = fit_ridge(fitted, effects[1:], ridge=ridge, intercept=intercept)
        rng = torch_rng(seed, "held-out perturbed vectors")
        basis = found.basis if found.rank < len(subject.theta) else None
        others = perturbed(subject.theta, steps, n_held_out, rng, basis)
        same, fresh = (
            _scored(model, prompts, subject, found, others, progress) for prompts in (fit_on, few)
        )
        added = {MAPPED: found.predict(theta.cpu())[0], MEAN_EFFECT: effects[0]}
        answers = _answers(model, score_on, subject, added)
    return Propagation(
        task=task.name,
        layer=subject.layer,
        theta=subject.theta,
        matrix=found.matrix,
        bias=found.bias,
        rank=found.rank,
        spread=sizes,
        ridge=found.ridge,
        n_perturbations=count,
        n=len(fit_on),
        n_held_out_queries=len(few),
        split=split,
        effect=effects[0],
        held_out=fresh,
        same_queries=same,
        answers=answers,
        centred=subject.is_centred(model),
        provenance=Provenance.of(model, task, seed),
    )


def _scored(
    model: TransformerBridge,
    prompts: Prompts,
    subject: Subject,
    found: Ridge,
    values: Float[Tensor, "vector d_model"],
    show: bool | None,
) -> HeldOut:
    effects = mean_effects(model, prompts, subject, values, show)
    predicted = found.predict(values.cpu())
    return HeldOut.of(subject.as_seen(model, effects), subject.as_seen(model, predicted))


def _answers(
    model: TransformerBridge,
    prompts: Prompts,
    subject: Subject,
    added: dict[str, Float[Tensor, " d_model"]],
) -> dict[str, Answers]:
    """The answers without θ, with θ, and with vectors added behind the last block instead."""
    vectors = [subject.vector(torch.zeros_like(subject.theta)), subject.vector()]
    plain, full = scan(model, prompts, vectors, output="residual", show=False)
    states = {ZERO_SHOT: plain, FULL: full}
    states |= {name: plain + value.to(plain) for name, value in added.items()}
    against = rivals_under(model, prompts, plain[None])
    return {name: answers_of(model, each, prompts, against) for name, each in states.items()}


def _spread(spread: float | Sequence[float]) -> tuple[float, ...]:
    sizes = (spread,) if isinstance(spread, (int, float)) else tuple(spread)
    if not sizes or not all(0 < size < float("inf") for size in sizes):
        raise InvalidInput(
            f"spread={spread} is no share of the vector's norm; use a number above 0, or several "
            "(0.01 to 1 in practice)."
        )
    return tuple(map(float, sizes))


def _check(wanted: int, count: int, n_held_out: int, n: int, span: bool) -> None:
    least = {"n_perturbations": (count, 2), "n_held_out": (n_held_out, 2), "n": (n, 1)}
    for name, (value, lowest) in least.items():
        if value < lowest:
            raise InvalidInput(f"{name}={value} is too small; use {lowest} or more.")
    if count < wanted and not span:
        raise InvalidInput(
            f"n_perturbations={count} do not determine a map with {wanted} numbers an output; "
            f"use {2 * wanted} or more, or span=True to fit and score it in their span only."
        )
