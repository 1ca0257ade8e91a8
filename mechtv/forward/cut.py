"""Which part of a pass has to run: the rectangle around what is edited, read or wanted."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.forward.memory import Cut, Memory
from mechtv.forward.rectangle import Rectangle
from mechtv.tasks.prompts import Prompts
from mechtv.vectors.inject import hook_point
from mechtv.vectors.layout import ActsOn, Layout
from mechtv.vectors.site import Site
from mechtv.vectors.vector import TaskVector

Places = tuple[Int[Tensor, " place"], Int[Tensor, " place"]]


def cut_around(
    memory: Memory,
    model: TransformerBridge,
    prompts: Prompts,
    vector: TaskVector | None,
    layout: Layout,
    *,
    places: Places | None = None,
    sites: Sequence[Site] = (),
    learning: bool | None = None,
) -> Cut | None:
    """The pass cut to a rectangle; None where nothing is edited, or the full pass has to run.

    Args:
        places: rows and columns whose logits are wanted. `sites`: what is read, or changed beside
            the vector.
        learning: whether gradients will be wanted; if None, whether the vector's values want them.
    """
    if vector is None and not sites:
        return None
    if places is not None and not bool(prompts.mask[places].all()):
        return None  # of padding, only the full pass knows
    for site in () if vector is None else vector.sites:
        hook_point(model, site)
    rectangle = rectangle_around(prompts, vector, layout, places=places, sites=sites)
    learning = _wants_gradients(vector) if learning is None else learning
    return memory.cut(model, prompts, rectangle, learning=learning)


def rectangle_around(
    prompts: Prompts,
    vector: TaskVector | None,
    layout: Layout,
    *,
    places: Places | None = None,
    sites: Sequence[Site] = (),
) -> Rectangle:
    """What a vector's edits, and some places and sites, take in."""
    touched: list[tuple[Site, ActsOn]] = [(site, "prompt") for site in sites]
    if vector is not None:
        touched += [(site, vector.acts_on) for site in vector.sites]
    return Rectangle.around(prompts, layout, touched, places)


def _wants_gradients(vector: TaskVector | None) -> bool:
    if vector is None or not torch.is_grad_enabled():
        return False
    tensors = (x for edit in vector.edits for x in edit.operation.tensors().values())
    return any(x.requires_grad for x in tensors)
