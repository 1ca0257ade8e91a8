"""Which attention heads carry a task: the average indirect effect (AIE) of each head.

Each head's output at the last token is replaced by its mean over in-context prompts, on prompts
whose demonstrations have shuffled answers; a head that then raises the right answer's probability
carries the task (Todd et al. 2024, *Function Vectors in Large Language Models*, section 2.3). The
effect is that of one head alone: heads that only work together do not show.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from operator import index

import numpy as np
import pandas as pd
import torch
from einops import rearrange
from jaxtyping import Float
from scipy import stats
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.evaluation.intervals import intervals_of_means
from mechtv.evaluation.provenance import UNKNOWN, Provenance
from mechtv.forward.memory import steady
from mechtv.forward.run import capture, in_batches, last_logits, log_probabilities, wide
from mechtv.forward.setting import device_of
from mechtv.forward.variants import scan
from mechtv.methods.shuffled import shuffled_prompts
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import Task
from mechtv.vectors.card import Card
from mechtv.vectors.edits import Edit, Replace
from mechtv.vectors.site import Site
from mechtv.vectors.vector import TaskVector

Head = tuple[int, int]
"""A layer and a query head, both counted from 0."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadEffects:
    """The indirect effect of every head on every shuffled prompt.

    Args:
        task: the task's name; `queries` the shuffled prompts' queries, in order.
        shots: demonstrations in each prompt; `n` how many clean prompts the means are over.
        per_prompt: p(right answer) with the head's output replaced by its mean, minus p without.
        baseline: p without, of each shuffled prompt.
        means: each head's mean output before W_O, at the last token of the clean prompts.
        task_checksum: of the task that was measured (`Task.checksum`).
        provenance: model, weights, template and seed.
    """

    task: str
    queries: tuple[tuple[str, ...], ...]
    shots: int
    n: int
    per_prompt: Float[np.ndarray, "layer head prompt"]
    baseline: Float[np.ndarray, " prompt"]
    means: Float[Tensor, "layer head d_head"]
    task_checksum: str = ""
    provenance: Provenance = UNKNOWN

    @property
    def n_shuffled(self) -> int:
        """How many shuffled prompts the effects are averaged over."""
        return len(self.baseline)

    @property
    def mean(self) -> Float[np.ndarray, "layer head"]:
        """The AIE: the mean effect over prompts."""
        average: Float[np.ndarray, "layer head"] = self.per_prompt.mean(axis=-1)
        return average

    def top(self, how_many: int | float) -> tuple[Head, ...]:
        """The heads with the largest AIE as (layer, head), strongest first.

        Args:
            how_many: a count (10), or a share of all heads between 0 and 1 (0.1), rounded up.

        Raises:
            InvalidInput: for a count below 1 or above the number of heads, or another share.
        """
        return ranked(self.mean)[: n_chosen(how_many, self.mean.size)]

    def table(self) -> pd.DataFrame:
        """One row a head: AIE, 95 % bootstrap interval over prompts, n, and rank (1 is first)."""
        low, high = intervals_of_means(self.per_prompt)
        rank = {head: place for place, head in enumerate(ranked(self.mean), start=1)}
        return pd.DataFrame(
            {
                "task": self.task,
                "shots": self.shots,
                "layer": layer,
                "head": head,
                "effect": float(effect),
                "low": float(low[layer, head]),
                "high": float(high[layer, head]),
                "n": self.n_shuffled,
                "rank": rank[layer, head],
            }
            | self.provenance.columns()
            for (layer, head), effect in np.ndenumerate(self.mean)
        )

    def rank_correlation(self, other: "HeadEffects") -> float:
        """Spearman's rank correlation of two AIEs over all heads: how stable the ranking is.

        Raises:
            InvalidInput: if they are of two models.
        """
        _check_one_model([self, other])
        return float(stats.spearmanr(self.mean.ravel(), other.mean.ravel()).statistic)


def measure_head_effects(
    model: TransformerBridge,
    task: Task,
    *,
    shots: int = 10,
    n: int = 100,
    n_shuffled: int = 25,
    seed: int = 0,
    progress: bool | None = None,
) -> HeadEffects:
    """The AIE of every head on a task (Todd et al. 2024, section 2.3), in raw probabilities.

    Shuffled prompts keep their query and its answer; their demonstrations exchange theirs, so that
    as few as possible keep their own. With two labels in equal shares that flips every label.

    Args:
        shots: demonstrations in each prompt, clean or shuffled.
        n: how many clean prompts each head's output is averaged over; queries and demonstrations
            are training examples. Fewer if the training split is smaller.
        n_shuffled: how many shuffled prompts; queries are validation examples. Fewer if that split
            is smaller.

    Raises:
        InvalidInput: for fewer than 2 shots, n or n_shuffled below 1, or too small a pool.
    """
    if shots < 2:
        raise InvalidInput(
            f"shots={shots} leaves no answers to shuffle; use 2 or more demonstrations."
        )
    for name, value in (("n", n), ("n_shuffled", n_shuffled)):
        if value < 1:
            raise InvalidInput(f"{name}={value} is too small; use 1 or more prompts.")
    prompts = shuffled_prompts(model, task, shots=shots, n=n_shuffled, seed=seed)
    n = min(n, len(task.splits(seed).train))
    means = mean_head_outputs(model, task, shots=shots, n=n, seed=seed, progress=progress)
    with torch.no_grad(), steady(model):
        baseline = in_batches(
            prompts,
            lambda batch: _answer_probability(last_logits(model, batch), batch),
            title=f"shuffled prompts of {task.name}",
            show=progress,
        )
        patched = scan(
            model,
            prompts,
            _replacements(means),
            _answer_probability,
            title=f"heads, {task.name}",
            show=progress,
        )
    effects = rearrange(
        patched - baseline, "(layer head) prompt -> layer head prompt", layer=len(means)
    )
    return HeadEffects(
        task=task.name,
        queries=tuple(example.key for example in prompts.examples),
        shots=shots,
        n=n,
        per_prompt=effects.numpy(),
        baseline=baseline.numpy(),
        means=means,
        task_checksum=task.checksum(),
        provenance=Provenance.of(model, task, seed),
    )


def universal_heads(effects: Sequence[HeadEffects], how_many: int | float) -> tuple[Head, ...]:
    """The heads with the largest AIE over several tasks, each task with equal weight.

    Args:
        effects: of one model; several of one task are averaged first.
        how_many: a count, or a share of all heads, as in `HeadEffects.top`.

    Raises:
        InvalidInput: for no effects, effects of two models, or a count that cannot be.
    """
    if not effects:
        raise InvalidInput("There are no effects to rank heads by; give those of one task or more.")
    _check_one_model(effects)
    by_task: dict[str, list[Float[np.ndarray, "layer head"]]] = defaultdict(list)
    for one in effects:
        by_task[one.task].append(one.mean)
    overall = np.mean([np.mean(means, axis=0) for means in by_task.values()], axis=0)
    return ranked(overall)[: n_chosen(how_many, overall.size)]


def mean_head_outputs(
    model: TransformerBridge,
    task: Task,
    *,
    shots: int,
    n: int,
    seed: int = 0,
    progress: bool | None = None,
) -> Float[Tensor, "layer head d_head"]:
    """Every head's output before W_O at the last token, the mean over `n` clean prompts.

    The average is in float32, or in float64 for such models.
    """
    prompts = Prompts.of(model, task, split="train", shots=shots, n=n, seed=seed)
    sites = [Site(component="z", layer=layer) for layer in range(model.cfg.n_layers)]

    def outputs(batch: Prompts) -> Float[Tensor, "batch layer head d_head"]:
        found = capture(model, batch, sites)
        return torch.stack([wide(found[s][:, 0]).to(device_of(model)) for s in sites], dim=1)

    title = f"{shots}-shot head outputs of {task.name}"
    with torch.no_grad(), steady(model):
        return in_batches(prompts, outputs, title=title, show=progress).mean(dim=0)


def ranked(mean: Float[np.ndarray, "layer head"]) -> tuple[Head, ...]:
    """All heads, the largest effect first; equal ones by layer and head."""
    order = np.argsort(-mean.ravel(), kind="stable")
    layers, heads = np.unravel_index(order, mean.shape)
    return tuple(zip(layers.tolist(), heads.tolist(), strict=True))


def n_chosen(how_many: int | float, n_heads: int) -> int:
    """How many of `n_heads` heads a count or a share is.

    Raises:
        InvalidInput: for a count below 1 or above `n_heads`, or a share not between 0 and 1.
    """
    if isinstance(how_many, float):
        if not 0 < how_many < 1:
            raise InvalidInput(
                f"{how_many} is no share of the heads; use one between 0 and 1 (0.1 is a tenth), "
                "or a whole number to count them."
            )
        return math.ceil(Decimal(str(how_many)) * n_heads)  # as written: 0.07 of 100 is 7, not 8
    if not 1 <= index(how_many) <= n_heads:
        raise InvalidInput(
            f"{how_many} heads were asked for, of {n_heads} that are ranked; give 1 to {n_heads}, "
            "or a share such as 0.1."
        )
    return index(how_many)


def _replacements(means: Float[Tensor, "layer head d_head"]) -> list[TaskVector]:
    """For each head in turn, the edit that puts its mean in the place of its output."""
    card = Card(method="mean head output")
    edits = [
        Edit(
            site=Site(component="z", layer=layer, heads=(head,)),
            operation=Replace(value=means[layer, head : head + 1]),
        )
        for layer, head in np.ndindex(means.shape[:2])
    ]
    return [TaskVector(edits=(edit,), card=card) for edit in edits]


def _answer_probability(
    logits: Float[Tensor, "batch d_vocab"], prompts: Prompts
) -> Float[Tensor, " batch"]:
    """The probability of each answer's first token, on the CPU."""
    answers = prompts.first_answer_tokens.to(logits.device)
    chosen = log_probabilities(logits).gather(1, answers[:, None])[:, 0]
    return chosen.cpu().double().exp()


def _check_one_model(effects: Sequence[HeadEffects]) -> None:
    kinds = {
        (e.provenance.model, e.provenance.revision, e.provenance.weights, e.mean.shape): e
        for e in effects
    }
    if len(kinds) > 1:
        named = " and ".join(
            f"{model} ({weights} weights, {shape[0]} layers of {shape[1]} heads)"
            for model, _, weights, shape in kinds
        )
        raise InvalidInput(f"Heads of two models cannot be compared: {named}; use those of one.")
