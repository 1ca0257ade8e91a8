"""Where key heads look from the last token, beside random heads.

On the injected zero-shot run ("Task Vectors, Learned Not Extracted" (ICLR 2026), attention of key
heads): a head can pass on the vector itself only by attending from the last token to the last
token, and what earlier blocks wrote there likewise.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.analysis.circuits import Head, check_heads
from mechtv.analysis.head_outputs import by_layer, other_heads
from mechtv.analysis.subject import Subject
from mechtv.errors import InvalidInput
from mechtv.evaluation.intervals import Estimate, mean
from mechtv.evaluation.provenance import UNKNOWN, Provenance
from mechtv.evaluation.seeds import seed_for
from mechtv.forward.memory import steady
from mechtv.forward.probe import from_last, observe
from mechtv.forward.run import in_batches
from mechtv.seeds import python_rng
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import SplitName, Task
from mechtv.vectors.vector import TaskVector

PARTS = ("first token", "rest", "final tokens", "last token")
"""In the order of the prompt. Each token is in one part: the first one is not final too, and in a
prompt of one token that is the last."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionShares:
    """The attention that each head pays from the last token N, in four parts that add up to 1.

    The parts are the first real token (BOS where there is one), the rest, the final tokens before
    N, and N itself (c_NN). The attention to all final positions is that of the last two together.

    Args:
        layer: the block at whose input the vector is added.
        heads: key heads; `random_heads` others. `shares` and `random_shares` have a row for each.
        final: how many of the last tokens are the final ones, N included.
        queries: the prompts' queries, in order.
    """

    task: str
    layer: int
    heads: tuple[Head, ...]
    random_heads: tuple[Head, ...]
    final: int
    split: str
    queries: tuple[tuple[str, ...], ...]
    shares: Float[np.ndarray, "head query part"]
    random_shares: Float[np.ndarray, "other query part"]
    provenance: Provenance = UNKNOWN

    def estimates(self, group: str) -> dict[str, Estimate]:
        """Each part's mean over the `key` or the `random` heads.

        The interval is over heads, which differ far more than queries do; n counts heads.

        Raises:
            InvalidInput: for another group.
        """
        if group not in ("key", "random"):
            raise InvalidInput(f"group={group!r} is unknown; use key or random.")
        shares = self.shares if group == "key" else self.random_shares
        by_head = shares.mean(axis=1)
        return {part: mean(by_head[:, number]) for number, part in enumerate(PARTS)}

    def table(self) -> pd.DataFrame:
        """One row a (group, part) over its heads, then one a (head, part) over queries.

        Layer and head are missing in the rows of a group. Each has a value, a 95 % bootstrap
        interval, and n: heads, or queries.
        """
        about = {"task": self.task, "injection layer": self.layer, "split": self.split}
        settings = {"final": self.final}
        others = (self.random_heads, self.random_shares)
        groups = {"key": (self.heads, self.shares), "random": others}
        rows: list[dict[str, Any]] = []
        for group in groups:
            for part, e in self.estimates(group).items():
                rows.append({"group": group, "layer": None, "head": None, "part": part} | asdict(e))
        for group, (heads, shares) in groups.items():
            for (layer, head), own in zip(heads, shares, strict=True):
                where = {"group": group, "layer": layer, "head": head}
                parts = zip(PARTS, own.T, strict=True)
                rows += [where | {"part": part} | asdict(mean(values)) for part, values in parts]
        table = pd.DataFrame([about | settings | row | self.provenance.columns() for row in rows])
        return table.astype({"layer": "Int64", "head": "Int64"})


def attention_of_heads(
    model: TransformerBridge,
    task: Task,
    vector: TaskVector,
    heads: Sequence[Head],
    *,
    final: int = 5,
    n_random: int = 20,
    n: int | None = None,
    split: SplitName = "test",
    seed: int | None = None,
    progress: bool | None = None,
) -> AttentionShares:
    """Split the attention of heads from the last token, on the injected zero-shot run.

    Args:
        heads: pairs (layer, head), such as `HeadRanking.top(0.1)`; query heads.
        final: how many of the last tokens are the final positions, the last one included.
        n_random: how many other heads, drawn from the blocks at or behind the vector's.
        n: how many queries; the whole split if None.
        seed: fixes the splits and the draw; that of the vector if None.

    Raises:
        InvalidInput: for a vector that is not one value added at the last token, heads that do not
            exist, fewer other heads than `n_random`, or a `final` or `n_random` that is no
            whole number above 0.
    """
    subject, heads = Subject.of(model, vector), check_heads(model, heads)
    seed = seed_for(vector) if seed is None else seed
    for name, value in (("final", final), ("n_random", n_random)):
        if value < 1 or value % 1:
            raise InvalidInput(f"{name}={value!r} is no count; use a whole number, 1 or more.")
    drawn = _drawn(other_heads(model, heads, layer=subject.layer), n_random, seed)
    every = tuple(sorted((*heads, *drawn)))
    prompts = Prompts.of(model, task, split=split, n=n, seed=seed)

    def read(batch: Prompts) -> Float[Tensor, "batch head part"]:
        patterns = _patterns(model, batch, vector, every)
        parts = _parts(batch, final).to(patterns)
        return einsum(patterns, parts, "b head key, part b key -> b head part").cpu().double()

    with torch.no_grad(), steady(model):
        found = in_batches(prompts, read, title="attention of heads", show=progress)
    shares = rearrange(found, "query head part -> head query part").numpy()
    return AttentionShares(
        task=task.name,
        layer=subject.layer,
        heads=heads,
        random_heads=drawn,
        final=final,
        split=split,
        queries=tuple(example.key for example in prompts.examples),
        shares=shares[[every.index(pair) for pair in heads]],
        random_shares=shares[[every.index(pair) for pair in drawn]],
        provenance=Provenance.of(model, task, seed),
    )


def _patterns(
    model: TransformerBridge, prompts: Prompts, vector: TaskVector, heads: Sequence[Head]
) -> Float[Tensor, "batch head key"]:
    """The attention from the last token, head by head in their order."""
    names = {layer: f"blocks.{layer}.attn.hook_pattern" for layer in by_layer(heads)}
    found = observe(model, prompts, dict.fromkeys(names.values(), from_last), vector)
    return torch.stack([found[names[layer]][:, head] for layer, head in heads], dim=1)


def _parts(prompts: Prompts, final: int) -> Bool[Tensor, "part batch key"]:
    """Which real tokens are in each of `PARTS`; each is in one."""
    columns = torch.arange(prompts.tokens.shape[1])
    from_end = columns - prompts.last[:, None]
    last = from_end == 0
    first = (columns == prompts.mask.long().argmax(dim=1)[:, None]) & ~last
    near = (from_end > -final) & (from_end < 0) & prompts.mask & ~first
    rest = prompts.mask & (from_end < 0) & ~first & ~near
    return torch.stack([first, rest, near, last])


def _drawn(others: Sequence[Head], n: int, seed: int) -> tuple[Head, ...]:
    if len(others) < n:
        raise InvalidInput(
            f"There are {len(others)} other heads at or behind the vector's block, not the "
            f"n_random={n} wanted; give fewer heads or a smaller n_random."
        )
    return tuple(sorted(python_rng(seed, "random heads beside key heads").sample(others, n)))
