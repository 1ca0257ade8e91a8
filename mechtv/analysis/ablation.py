"""What a vector's effect loses without some heads, beside random sets of as many others.

A head is ablated by changing its output before W_O, on the injected zero-shot run ("Task Vectors,
Learned Not Extracted" (ICLR 2026); docs/analyses.md, head ablation). Several heads are ablated at
once: heads that stand in for each other show only so. For each head alone see `rank_heads`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.analysis.answers import Answers, fixed_rivals
from mechtv.analysis.circuits import Head, check_heads
from mechtv.analysis.head_outputs import (
    Mode,
    head_outputs,
    other_heads,
    replacements,
    training_prompts,
    without,
)
from mechtv.analysis.head_resampling import donors_of, scan_resampled
from mechtv.analysis.subject import Subject
from mechtv.errors import InvalidInput
from mechtv.evaluation.intervals import LEVEL, Comparison, compare_means, compare_shares
from mechtv.evaluation.provenance import UNKNOWN, Provenance
from mechtv.evaluation.seeds import seed_for
from mechtv.forward.memory import steady
from mechtv.forward.variants import scan
from mechtv.seeds import python_rng
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import SplitName, Task
from mechtv.vectors.site import Positions, checked_positions
from mechtv.vectors.vector import TaskVector

FEWEST_SETS = 20


@dataclass(frozen=True, kw_only=True, eq=False)
class Ablation:
    """Scores of a vector with no head ablated, with the given ones, and with random sets.

    Args:
        layer: the block at whose input the vector is added.
        heads: those that were ablated, as (layer, head); `random_sets` others, as many in each.
        mode, positions: how, and at which tokens.
        queries: the prompts' queries, in order.
        intact, ablated, random: the answers' scores; `random` has one entry a set. Every run's
            rivals are those of the intact one.
    """

    task: str
    layer: int
    heads: tuple[Head, ...]
    random_sets: tuple[tuple[Head, ...], ...]
    mode: Mode
    positions: Positions
    split: str
    queries: tuple[tuple[str, ...], ...]
    intact: Answers
    ablated: Answers
    random: tuple[Answers, ...]
    provenance: Provenance = UNKNOWN

    def random_values(self, score: str = "log-probability") -> Float[np.ndarray, " set"]:
        """A score of each random set: `log-probability`, or another of `Answers.estimates`.

        Raises:
            UnknownName: if there is no such score.
        """
        _ = self.intact.values(score)  # also where there are no sets
        return np.array([answers.values(score).mean() for answers in self.random])

    def p_value(self, score: str = "log-probability") -> float:
        """How rarely a random set's ablation leaves as low a score as the given heads' does.

        (1 + sets whose score is as low or lower) / (1 + sets): 1/21 is the least for 20 sets. NaN
        without random sets, or where a given head lies before the vector's block: no random set
        has such heads, so they are no measure of it.

        Raises:
            UnknownName: if there is no such score.
        """
        values = self.random_values(score)
        if not len(values) or min(self.heads)[0] < self.layer:
            return math.nan
        as_low = values <= self.ablated.values(score).mean()
        return float((1 + as_low.sum()) / (1 + len(values)))

    def compare(self, score: str = "log-probability") -> Comparison:
        """The given heads ablated minus intact, on the same queries, with a paired test.

        Raises:
            UnknownName: if there is no such score.
        """
        first, second = self.ablated.values(score), self.intact.values(score)
        return (compare_shares if first.dtype == bool else compare_means)(first, second)

    def table(self) -> pd.DataFrame:
        """One row a (score, condition): value, low, high, n queries, n_sets, p_value.

        Of `random heads` the value is the mean over the sets, and low and high hold 95 % of the
        sets; else they are the 95 % interval over queries. `p_value` is as in `Ablation.p_value`.
        """
        about = {"task": self.task, "layer": self.layer, "n_heads": len(self.heads)}
        about |= {"mode": self.mode, "positions": str(self.positions), "split": self.split}
        intact, ablated = self.intact.estimates(), self.ablated.estimates()
        rows: list[dict[str, Any]] = []
        for score in intact:
            rows.append({"score": score, "condition": "intact"} | asdict(intact[score]))
            rows.append({"score": score, "condition": "given heads"} | asdict(ablated[score]))
            rows[-1] |= {"n_sets": 1, "p_value": self.p_value(score)}
            if self.random:
                rows.append({"score": score, "condition": "random heads"} | self._spread(score))
        return pd.DataFrame([about | row | self.provenance.columns() for row in rows])

    def _spread(self, score: str) -> dict[str, float | int]:
        values = self.random_values(score)
        low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
        found = {"value": float(values.mean()), "low": low, "high": high}
        return found | {"n": len(self.queries), "n_sets": len(values)}


def ablate_heads(
    model: TransformerBridge,
    task: Task,
    vector: TaskVector,
    heads: Sequence[Head],
    *,
    mode: Mode = "mean",
    positions: Positions = (-1,),
    n_random: int = 20,
    n_train: int = 100,
    n: int | None = None,
    split: SplitName = "test",
    seed: int | None = None,
    progress: bool | None = None,
) -> Ablation:
    """Ablate heads together on the injected zero-shot run, and random sets of as many others.

    Args:
        heads: pairs (layer, head), such as `HeadRanking.top(0.1)`; query heads, in raw weights.
        mode: what stands in the place of a head's output before W_O: `zero`; `mean`, its mean over
            training queries on the injected run (each position has its own, `"all"` tokens share
            one); `resample`, what it is for another training query, drawn once for each query and
            the same for every set of heads.
        positions: the tokens at which they are ablated; `resample` knows the last one only.
        n_random: how many sets, distinct and drawn without the given heads from the blocks at or
            behind the vector's: 20 or more, or 0 for none.
        n_train: how many training queries `mean` and `resample` are from; fewer if the split is
            smaller.
        n: how many queries are scored; the whole split if None.
        seed: fixes splits and draws; that of the vector if None.

    Raises:
        InvalidInput: for a vector that is not one value added at the last token, heads that do not
            exist, too few heads for the random sets, or another option that cannot be.
    """
    subject, heads = Subject.of(model, vector), check_heads(model, heads)
    seed = seed_for(vector) if seed is None else seed
    places = _checked(mode, positions, n_random)
    sets = random_sets(model, heads, n_random, layer=subject.layer, seed=seed)
    prompts = Prompts.of(model, task, split=split, n=n, seed=seed)
    if prompts.labels:
        _ = prompts.first_label_tokens  # labels that share a token are refused before any pass
    every = [(), heads, *sets]
    layers = sorted({layer for some in every for layer, _ in some})
    source = training_prompts(model, task, n_train, seed)
    with torch.no_grad(), steady(model):
        score = partial(_columns, rivals_of=fixed_rivals(model, prompts, vector))
        if mode == "resample":
            outputs = head_outputs(model, source, vector, layers, (-1,), progress)
            donors = outputs[donors_of(prompts, source, seed), :, 0]
            scores = scan_resampled(model, prompts, vector, every, layers, donors, score, progress)
        else:
            values = replacements(model, source, vector, layers, mode, places, progress)
            variants = [without(vector, some, values, places) for some in every]
            scores = scan(model, prompts, variants, score, title="head sets", show=progress)
    closed = bool(prompts.labels)
    intact, ablated, *random = (Answers.of_columns(part, closed=closed) for part in scores)
    return Ablation(
        task=task.name,
        layer=subject.layer,
        heads=heads,
        random_sets=sets,
        mode=mode,
        positions=places,
        split=split,
        queries=tuple(example.key for example in prompts.examples),
        intact=intact,
        ablated=ablated,
        random=tuple(random),
        provenance=Provenance.of(model, task, seed),
    )


def random_sets(
    model: TransformerBridge, heads: Sequence[Head], n: int, *, layer: int, seed: int
) -> tuple[tuple[Head, ...], ...]:
    """`n` distinct sets of as many other heads, drawn from the blocks from `layer` on.

    Raises:
        InvalidInput: if there are not so many.
    """
    others = other_heads(model, heads, layer=layer)
    possible = math.comb(len(others), len(heads))
    if possible < n:
        raise InvalidInput(
            f"Blocks {layer} to {model.cfg.n_layers - 1} have {len(others)} heads besides the "
            f"{len(heads)} given, which make {possible} sets of that size, not the {n} wanted; "
            "give fewer heads, or n_random=0 for no random sets."
        )
    rng = python_rng(seed, f"random sets of {len(heads)} heads")
    found: dict[tuple[Head, ...], None] = {}
    while len(found) < n:
        found[tuple(sorted(rng.sample(others, len(heads))))] = None
    return tuple(found)


def _checked(mode: Mode, positions: object, n_random: int) -> Positions:
    if mode not in get_args(Mode):
        raise InvalidInput(f"mode={mode!r} is unknown; use one of {', '.join(get_args(Mode))}.")
    if n_random and n_random < FEWEST_SETS:
        raise InvalidInput(
            f"n_random={n_random} is too few to tell chance; use {FEWEST_SETS} or more, or 0 for "
            "no random sets."
        )
    places = checked_positions(positions)
    if mode == "resample" and places != (-1,):
        raise InvalidInput(
            f"mode='resample' ablates at the last token only, not at positions={positions!r}; use "
            "positions=(-1,), or mode='mean' or 'zero'."
        )
    return places


def _columns(
    logits: Float[Tensor, "batch d_vocab"],
    prompts: Prompts,
    *,
    rivals_of: Callable[[Prompts], Int[Tensor, "batch rival"]],
) -> Float[Tensor, "batch score"]:
    return Answers.of(logits, prompts, rivals_of(prompts)).columns()
