"""Run a model under a task vector: logits and activations of prompts, with or without edits.

Every number in mechtv that needs a forward pass goes through here. Gradients flow to the values of
the vector's edits wherever the caller has them switched on.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.progress import progress
from mechtv.tasks.prompts import Prompts
from mechtv.vectors.inject import declared_layout, hooked
from mechtv.vectors.layout import Layout
from mechtv.vectors.site import Site
from mechtv.vectors.vector import TaskVector


def run(
    model: TransformerBridge,
    prompts: Prompts,
    vector: TaskVector | None = None,
    *,
    columns: Int[Tensor, "batch column"] | None = None,
) -> Float[Tensor, "batch column d_vocab"]:
    """The logits at chosen columns of each row, under a vector.

    Args:
        vector: applied at each row's own positions, counted from `prompts.last`; None for the plain
            model.
        columns: for each row, the columns whose logits are wanted; each row's last prompt token if
            None.

    Returns:
        Logits in the model's data type.

    Raises:
        InvalidInput: if the vector does not fit the model, or a row is too short for its positions.
    """
    wanted = prompts.last[:, None] if columns is None else columns.contiguous()
    with declared_layout(model, layout_of(prompts, model)), applied(vector, model):
        logits, kept = _logits(model, prompts, wanted)
    column = torch.searchsorted(kept, wanted.to(kept.device)).to(logits.device)
    return logits.take_along_dim(column[:, :, None], dim=1)


def last_logits(
    model: TransformerBridge, prompts: Prompts, vector: TaskVector | None = None
) -> Float[Tensor, "batch d_vocab"]:
    """The logits at each row's last prompt token."""
    return run(model, prompts, vector)[:, 0]


def capture(
    model: TransformerBridge,
    prompts: Prompts,
    sites: Sequence[Site],
    vector: TaskVector | None = None,
) -> dict[Site, Float[Tensor, "batch slot *feature"]]:
    """The activations at some sites, after the vector's edits there.

    The pass ends behind the last block that a site needs. Gradients flow where they are switched
    on.

    Returns:
        For each site its activations: one slot a position, in the site's order. For `"all"`
        positions, one slot a column, padding included.

    Raises:
        InvalidInput: for no sites, a site that the model lacks, or a row too short for a position.
    """
    if not sites:
        raise InvalidInput("There are no sites to capture; give at least one.")
    layout = layout_of(prompts, model)
    taken: dict[Site, Tensor] = {}
    with ExitStack() as stack:
        stack.enter_context(declared_layout(model, layout))
        stack.enter_context(applied(vector, model))
        for site in sites:
            hook = partial(_keep, taken=taken, site=site, layout=layout)
            stack.enter_context(hooked(model, site, hook))
        last = max(site.layer for site in sites)
        if last + 1 < model.cfg.n_layers:
            _call(model, prompts)(stop_at_layer=last + 1)
        else:
            _logits(model, prompts, prompts.last[:1, None])
    return taken


def in_batches(
    prompts: Prompts,
    compute: Callable[[Prompts], Tensor],
    *,
    batch_size: int = 64,
    title: str = "prompts",
    show: bool | None = None,
) -> Tensor:
    """Apply `compute` (rows in, rows out) to batches of prompts of like length; rows in order.

    Raises:
        InvalidInput: if `batch_size` is below 1.
    """
    if batch_size < 1:
        raise InvalidInput(f"batch_size={batch_size} is too small; use 1 or more.")
    order = prompts.lengths.argsort(stable=True)
    chunks = order.split(batch_size)
    parts = [
        compute(prompts.select(rows.tolist()))
        for rows in progress(chunks, title=title, show=show, total=len(chunks))
    ]
    return torch.cat(parts)[order.argsort()]


def layout_of(prompts: Prompts, model: TransformerBridge) -> Layout:
    """The layout of one full pass over the prompts: what follows `last` counts as new tokens."""
    column = torch.arange(prompts.tokens.shape[1])
    in_prompt = column <= prompts.last[:, None]
    device = device_of(model)
    return Layout(
        prompt=(prompts.mask & in_prompt).to(device), new=(prompts.mask & ~in_prompt).to(device)
    )


def device_of(model: TransformerBridge) -> torch.device:
    """The device that takes the model's tokens."""
    return torch.device(model.cfg.device or "cpu")


def applied(
    vector: TaskVector | None, model: TransformerBridge
) -> AbstractContextManager[TransformerBridge]:
    """The model under a vector, or as it is where there is none."""
    return nullcontext(model) if vector is None else vector.applied(model)


def _logits(
    model: TransformerBridge, prompts: Prompts, wanted: Int[Tensor, "row column"]
) -> tuple[Float[Tensor, "batch kept d_vocab"], Int[Tensor, " kept"]]:
    """The logits of all columns that some row wants, and which columns these are."""
    kept = wanted.unique()
    if "logits_to_keep" in inspect.signature(model.original_model.forward).parameters:
        return _call(model, prompts)(logits_to_keep=kept), kept
    return _call(model, prompts)()[:, kept], kept


def _call(model: TransformerBridge, prompts: Prompts) -> Callable[..., Tensor]:
    device = device_of(model)
    return partial(model, prompts.tokens.to(device), attention_mask=prompts.mask.long().to(device))


def _keep(
    activation: Float[Tensor, "batch pos *feature"],
    hook: HookPoint,
    *,
    taken: dict[Site, Tensor],
    site: Site,
    layout: Layout,
) -> None:
    if site.positions == "all":
        taken[site] = activation
        return
    chosen = layout.select(site, "prompt")
    row, column, slot = (x.to(activation.device) for x in (chosen.row, chosen.column, chosen.slot))
    empty = activation.new_zeros(activation.shape[0], len(site.positions), *activation.shape[2:])
    taken[site] = empty.index_put((row, slot), activation[row, column])
