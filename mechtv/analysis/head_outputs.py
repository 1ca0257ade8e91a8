"""What heads write before W_O on the injected run, and what ablation puts in its place."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.analysis.circuits import Head
from mechtv.forward.run import capture, in_batches, wide
from mechtv.forward.setting import device_of
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import Task
from mechtv.vectors.edits import Edit, Replace
from mechtv.vectors.site import Positions, Site
from mechtv.vectors.vector import TaskVector

Mode = Literal["mean", "zero", "resample"]

Values = Mapping[int, Float[Tensor, "*query_or_slot head d_head"]]
"""What stands in the place of the heads' outputs, by layer."""


def by_layer(heads: Sequence[Head]) -> dict[int, tuple[int, ...]]:
    """Each layer's heads among some."""
    layers = sorted({layer for layer, _ in heads})
    return {at: tuple(head for layer, head in heads if layer == at) for at in layers}


def other_heads(model: TransformerBridge, heads: Sequence[Head], *, layer: int) -> list[Head]:
    """The heads of the blocks from `layer` on that are not among some."""
    cfg = model.cfg
    every = ((at, head) for at in range(layer, cfg.n_layers) for head in range(cfg.n_heads))
    return [pair for pair in every if pair not in heads]


def training_prompts(model: TransformerBridge, task: Task, n_train: int, seed: int) -> Prompts:
    """The zero-shot prompts that means and other queries' outputs are from.

    Raises:
        InvalidInput: if `n_train` is below 1.
    """
    n_train = min(n_train, len(task.splits(seed).train))
    return Prompts.of(model, task, split="train", n=n_train, seed=seed)


def head_outputs(
    model: TransformerBridge,
    prompts: Prompts,
    vector: TaskVector,
    layers: Sequence[int],
    positions: Positions,
    show: bool | None,
) -> Float[Tensor, "query layer slot head d_head"]:
    """The heads' outputs before W_O, on the injected run; of `"all"` tokens, their sum."""
    sites = [Site(component="z", layer=layer, positions=positions) for layer in layers]

    def read(batch: Prompts) -> Float[Tensor, "batch layer slot head d_head"]:
        found = capture(model, batch, sites, vector)
        each = torch.stack([wide(found[site]).to(device_of(model)) for site in sites], dim=1)
        if positions != "all":
            return each
        real = batch.mask.to(each)
        return einsum(each, real, "b layer pos head w, b pos -> b layer head w")[:, :, None]

    return in_batches(prompts, read, title="head outputs", show=show)


def replacements(
    model: TransformerBridge,
    source: Prompts,
    vector: TaskVector,
    layers: Sequence[int],
    mode: Mode,
    positions: Positions,
    show: bool | None = None,
) -> Values:
    """For each layer what `mean` or `zero` put in the place of its heads' outputs."""
    if mode == "zero":
        cfg = model.cfg
        zeros = torch.zeros(cfg.n_heads, cfg.d_head, dtype=cfg.dtype, device=device_of(model))
        return dict.fromkeys(layers, zeros)
    outputs = head_outputs(model, source, vector, layers, positions, show)
    if positions == "all":
        means = outputs.sum(dim=(0, 2)) / int(source.mask.sum())
    else:
        means = outputs.mean(dim=0)
    return dict(zip(layers, means, strict=True))


def without(
    vector: TaskVector, heads: Sequence[Head], values: Values, positions: Positions
) -> TaskVector:
    """The vector, and with it the heads' outputs replaced by values."""
    edits = [
        Edit(
            site=Site(component="z", layer=layer, positions=positions, heads=own),
            operation=Replace(value=values[layer][..., list(own), :]),
        )
        for layer, own in by_layer(heads).items()
    ]
    return replace(vector, edits=(*vector.edits, *edits))
