"""Hidden-state task vectors: the mean residual stream of k-shot prompts at the last token.

`replace` writes that state over the zero-shot one (Hendel et al. 2023, *In-Context Learning Creates
Task Vectors*, section 3); `add` adds the mean difference between the k-shot and the zero-shot state
("Vanilla TV" of *Task Vectors, Learned Not Extracted*, section 3).
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.forward.run import capture, in_batches, wide
from mechtv.methods.cards import card_for
from mechtv.methods.layers import as_layers
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import Task
from mechtv.vectors.edits import Add, Edit, Operation, Replace
from mechtv.vectors.inject import hook_point
from mechtv.vectors.site import Component, Site, checked_positions
from mechtv.vectors.vector import TaskVector

How = Literal["replace", "add"]


def extract_hidden_state(
    model: TransformerBridge,
    task: Task,
    layer: int | Sequence[int] | None = None,
    *,
    positions: int | Sequence[int] = -1,
    shots: int = 8,
    operation: How = "replace",
    component: Component = "resid_pre",
    n: int = 64,
    seed: int = 0,
    progress: bool | None = None,
) -> TaskVector:
    """The mean states of `n` k-shot prompts with dummy queries, at their last token.

    Args:
        layer: where the states are read and written, one block or several; the middle one if None.
            Choose it on `validation`, e.g. with `choose_layer`.
        positions: the tokens whose states are read and written, counted from the last one (-1).
        shots: demonstrations in each prompt.
        operation: `replace` the zero-shot state, or `add` the mean difference.
        component: what is read and written; the input of the block by default.
        n: how many prompts are averaged; their queries are training examples, none of which is
            among its own demonstrations. Fewer if the training split is smaller.

    Returns:
        A vector with one edit a layer; its value is `d_model` wide, or one such row for each of
        several positions.

    Raises:
        InvalidInput: for an unknown operation, no shots, a layer that the model lacks, a prompt
            too short for a position, or a pool that is too small.
    """
    if operation not in get_args(How):
        raise InvalidInput(f"operation={operation!r} is unknown; use 'replace' or 'add'.")
    if shots < 1:
        raise InvalidInput(
            f"shots={shots} leaves nothing to extract; use 1 or more demonstrations."
        )
    places = checked_positions(positions)
    if places == "all":
        raise InvalidInput(
            'positions="all" names no single tokens to read states at; use numbers such as '
            "(-2, -1)."
        )
    layers = as_layers(model.cfg.n_layers // 2 if layer is None else layer)
    sites = [Site(component=component, layer=number, positions=places) for number in layers]
    for site in sites:
        hook_point(model, site)
    n = min(n, len(task.splits(seed).train))

    def mean_states(k: int) -> list[Float[Tensor, "*slot_feature"]]:
        prompts = Prompts.of(model, task, split="train", shots=k, n=n, seed=seed)
        return _means(model, prompts, sites, title=f"{k}-shot states of {task.name}", show=progress)

    edits: list[Operation]
    if operation == "replace":
        edits = [Replace(value=value) for value in mean_states(shots)]
    else:
        pairs = zip(mean_states(shots), mean_states(0), strict=True)
        edits = [Add(value=in_context - zero_shot) for in_context, zero_shot in pairs]
    settings = {
        "layer": layers[0] if len(layers) == 1 else layers,
        "positions": sites[0].positions,
        "component": component,
        "shots": shots,
        "operation": operation,
        "n": n,
    }
    card = card_for(model, task, method="hidden_state", settings=settings, seed=seed)
    made = zip(sites, edits, strict=True)
    return TaskVector(edits=tuple(Edit(site=s, operation=e) for s, e in made), card=card)


def _means(
    model: TransformerBridge,
    prompts: Prompts,
    sites: Sequence[Site],
    *,
    title: str,
    show: bool | None,
) -> list[Float[Tensor, "*slot_feature"]]:
    """For each site the mean state over the prompts: one, or one a position."""

    def states(batch: Prompts) -> Float[Tensor, "batch site slot *feature"]:
        taken = capture(model, batch, sites)
        return torch.stack([wide(taken[site]) for site in sites], dim=1)

    with torch.no_grad():
        means = in_batches(prompts, states, title=title, show=show).mean(dim=0)
    one = len(sites[0].positions) == 1
    return [mean[0] if one else mean for mean in means]
