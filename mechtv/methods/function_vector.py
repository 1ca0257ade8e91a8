"""Function vectors: the summed mean outputs of the heads that carry a task.

The vector is added to the stream at the last token of one layer (Todd et al. 2024, *Function
Vectors in Large Language Models*, sections 2.3 and 2.4). Which heads they are is measured by
`measure_head_effects`, or given.
"""

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.evaluation.provenance import Provenance
from mechtv.methods.cards import card_for
from mechtv.methods.head_effects import (
    Head,
    HeadEffects,
    mean_head_outputs,
    measure_head_effects,
    n_chosen,
)
from mechtv.tasks.task import Task
from mechtv.vectors.edits import Add, Edit
from mechtv.vectors.inject import hook_point
from mechtv.vectors.site import Component, Site
from mechtv.vectors.vector import TaskVector


def extract_function_vector(
    model: TransformerBridge,
    task: Task,
    layer: int | None = None,
    *,
    shots: int = 10,
    heads: int | float | Sequence[Sequence[int]] = 10,
    effects: HeadEffects | None = None,
    n: int = 100,
    n_shuffled: int = 25,
    component: Component = "resid_pre",
    seed: int = 0,
    progress: bool | None = None,
) -> TaskVector:
    """The sum over some heads of (mean output at the last token of k-shot prompts) @ W_O.

    It is a sum of heads, so it never contains the attention's output bias b_O. In models that put a
    norm behind the attention (Gemma 2 and 3) it sums what the heads hand to that norm, as the
    formula says. Weights are used as they are: raw, unless the model was processed.

    Args:
        layer: where the vector is added; about a third of the model's depth if None.
        shots: demonstrations in each prompt.
        heads: how many of the heads with the largest AIE (10), which share of all heads (0.1), or
            the heads themselves as (layer, head) pairs, such as the `universal_heads` of other
            tasks: then no effects are measured.
        effects: the ranking to choose from, of this or another task or model of that shape;
            measured here if None. Its means are used too where measuring them here would give the
            same ones (task, queries, template, model, shots, n and seed agree).
        n: how many clean prompts each head's output is averaged over; fewer if the training split
            is smaller.
        n_shuffled: how many shuffled prompts the heads are ranked on, where effects are measured.
        component: what the vector is added to; the input of the block by default.

    Returns:
        A vector with one `Add` at the last token; its value is `d_model` wide. The card records the
        heads, their effects, and what these were measured on.

    Raises:
        InvalidInput: for heads or a layer that the model lacks, no heads, too few shots (2 where
            heads are ranked, else 1), or effects of a model with other layers and heads.
    """
    layer = round(model.cfg.n_layers / 3) if layer is None else index(layer)
    site = Site(component=component, layer=layer)
    _check_request(model, site, heads, effects, shots)
    sample = {"shots": shots, "n": min(n, len(task.splits(seed).train)), "seed": seed}
    if isinstance(heads, Sequence):
        chosen = tuple((layer, head) for layer, head in heads)  # a card holds them as lists
    else:
        if effects is None:
            effects = measure_head_effects(
                model, task, n_shuffled=n_shuffled, progress=progress, **sample
            )
        chosen = effects.top(heads)
    if effects is not None and _holds_means_of(effects, model, task, **sample):
        means = effects.means
    else:
        means = mean_head_outputs(model, task, progress=progress, **sample)
    settings = {"layer": layer, "component": component, "shots": shots, "n": sample["n"]}
    settings |= _about_heads(chosen, effects)
    card = card_for(model, task, method="function_vector", settings=settings, seed=seed)
    edit = Edit(site=site, operation=Add(value=summed_outputs(model, means, chosen)))
    return TaskVector(edits=(edit,), card=card)


def summed_outputs(
    model: TransformerBridge, means: Float[Tensor, "layer head d_head"], heads: Sequence[Head]
) -> Float[Tensor, " d_model"]:
    """What some heads write: their outputs times their own W_O, added up, without b_O."""
    with torch.no_grad():
        written = [
            means[layer, head] @ output_weights(model, layer)[head].to(means)
            for layer, head in heads
        ]
        return torch.stack(written).sum(dim=0)


def output_weights(model: TransformerBridge, layer: int) -> Float[Tensor, "head d_head d_model"]:
    """W_O of each query head of a layer, from whatever form the family keeps it in.

    Times what the family multiplies it by before it enters the stream (Granite).
    """
    factor = getattr(model.blocks[layer], "residual_contribution_scale", 1.0)
    weights: Tensor = factor * model.blocks[layer].attn.W_O
    return weights


def _holds_means_of(
    effects: HeadEffects, model: TransformerBridge, task: Task, *, shots: int, n: int, seed: int
) -> bool:
    """Whether measuring the means anew would give those that the effects hold."""
    return (effects.task_checksum, effects.shots, effects.n) == (
        task.checksum(),
        shots,
        n,
    ) and effects.provenance == Provenance.of(model, task, seed)


def _about_heads(chosen: Sequence[Head], effects: HeadEffects | None) -> dict[str, Any]:
    """The card's part on the heads: which, how strong, and on what they were ranked."""
    about: dict[str, Any] = {"heads": [list(head) for head in chosen]}
    if effects is None:
        return about | {"effects": None, "n_shuffled": None, "ranked_on": None}
    return about | {
        "effects": [float(effects.mean[head]) for head in chosen],
        "n_shuffled": effects.n_shuffled,
        "ranked_on": {"task": effects.task, "shots": effects.shots, "n": effects.n}
        | effects.provenance.columns(),
    }


def _check_request(
    model: TransformerBridge,
    site: Site,
    heads: int | float | Sequence[Sequence[int]],
    effects: HeadEffects | None,
    shots: int,
) -> None:
    """Refuse what cannot be before the first pass."""
    hook_point(model, site)
    if site.component == "z":
        raise InvalidInput(
            "component='z' holds heads, and a function vector is one d_model-wide sum of theirs; "
            "use resid_pre, resid_post, attn_out or mlp_out."
        )
    if shots < 1:
        raise InvalidInput(
            f"shots={shots} leaves nothing to extract; use 1 or more demonstrations."
        )
    shape = (model.cfg.n_layers, model.cfg.n_heads)
    if effects is not None and effects.mean.shape != shape:
        theirs = " x ".join(map(str, effects.mean.shape))
        raise InvalidInput(
            f"These effects are of {theirs} layers x heads, but the model has {shape[0]} x "
            f"{shape[1]}; use effects of a model of this shape."
        )
    if isinstance(heads, Sequence):
        _check_heads([(layer, head) for layer, head in heads], *shape)
    else:
        n_chosen(heads, shape[0] * shape[1])


def _check_heads(heads: Sequence[Head], n_layers: int, n_heads: int) -> None:
    if not heads or len(set(heads)) != len(heads):
        raise InvalidInput(f"heads={list(heads)} must name one or more distinct (layer, head).")
    for layer, head in heads:
        if not (0 <= layer < n_layers and 0 <= head < n_heads):
            raise InvalidInput(
                f"Head {head} of layer {layer} does not exist: this model has layers 0 to "
                f"{n_layers - 1} of heads 0 to {n_heads - 1}."
            )
