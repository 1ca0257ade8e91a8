"""Run a model under a task vector: logits and activations of prompts, with or without edits.

Every number in mechtv that needs a forward pass goes through here. Gradients flow to the values of
the vector's edits wherever the caller has them switched on. Only what the edits can change is
computed, over what is kept of the prompts; where that cannot be done, the full pass runs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.forward.chunks import in_chunks
from mechtv.forward.cut import Places, cut_around, rectangle_around
from mechtv.forward.full import full_logits, pass_through
from mechtv.forward.memory import steady
from mechtv.forward.prefix import replay
from mechtv.forward.setting import applied, layout_of
from mechtv.forward.unembed import unembedded
from mechtv.progress import progress_bar
from mechtv.tasks.prompts import Prompts
from mechtv.vectors.inject import declared_layout, hook_point, hooked
from mechtv.vectors.layout import Layout
from mechtv.vectors.site import Site
from mechtv.vectors.vector import TaskVector


def run(
    model: TransformerBridge,
    prompts: Prompts,
    vector: TaskVector | None = None,
    *,
    columns: Int[Tensor, "batch column"] | None = None,
    tokens: Int[Tensor, " token"] | None = None,
) -> Float[Tensor, "batch column token"]:
    """The logits at chosen columns of each row, under a vector.

    Args:
        vector: applied at each row's own positions, counted from `prompts.last`; None for the plain
            model.
        columns: for each row, the columns whose logits are wanted; each row's last prompt token if
            None.
        tokens: the tokens whose logits are wanted; the whole vocabulary if None.

    Returns:
        Logits in the model's data type.

    Raises:
        InvalidInput: if the vector does not fit the model, or a row is too short for its positions.
    """
    wanted = prompts.last[:, None] if columns is None else columns
    row = torch.arange(len(prompts)).repeat_interleave(wanted.shape[1])
    logits = logits_at(model, prompts, row, wanted.flatten(), vector, tokens=tokens)
    return rearrange(logits, "(b c) token -> b c token", b=len(prompts))


def logits_at(
    model: TransformerBridge,
    prompts: Prompts,
    row: Int[Tensor, " place"],
    column: Int[Tensor, " place"],
    vector: TaskVector | None = None,
    *,
    tokens: Int[Tensor, " token"] | None = None,
) -> Float[Tensor, "place token"]:
    """The logits at any places, each a row and a column; otherwise as `run`."""
    states = states_at(model, prompts, row, column, vector)
    if states is not None:
        return unembedded(model, states[None], tokens)[0]
    logits = full_logits_at(model, prompts, row, column, vector)
    return logits if tokens is None else logits[:, tokens.to(logits.device)]


def last_logits(
    model: TransformerBridge,
    prompts: Prompts,
    vector: TaskVector | None = None,
    *,
    tokens: Int[Tensor, " token"] | None = None,
) -> Float[Tensor, "batch token"]:
    """The logits at each row's last prompt token."""
    return run(model, prompts, vector, tokens=tokens)[:, 0]


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
    for site in sites:
        hook_point(model, site)
    taken: dict[Site, Tensor] = {}
    last_layer = max(site.layer for site in sites)
    layout = layout_of(prompts, model)
    with ExitStack() as stack:
        memory = stack.enter_context(steady(model))
        whole = any(site.positions == "all" for site in sites)
        cut = None
        if vector is not None and not whole:
            cut = cut_around(memory, model, prompts, vector, layout, sites=sites)
        if cut is not None:
            layout = cut.suffix.layout(layout)
        stack.enter_context(declared_layout(model, layout))
        stack.enter_context(applied(vector, model))
        for site in sites:
            hook = partial(_keep, taken=taken, site=site, layout=layout)
            stack.enter_context(hooked(model, site, hook))
        if cut is None:
            pass_through(model, prompts, last_layer=last_layer)
        else:
            replay(model, cut.prefix, last_layer=last_layer)
    return taken


@contextmanager
def kept(
    model: TransformerBridge,
    prompts: Prompts,
    vector: TaskVector,
    *,
    places: Places | None = None,
    sites: Sequence[Site] = (),
    stays: bool = False,
    show: bool | None = False,
) -> Iterator[None]:
    """Run the prompts once; inside the block, passes over any of their rows begin from there.

    The model stays as it is meanwhile, and so do the places that passes edit and read.

    Args:
        vector: one with edits where those of the passes will be; values do not matter.
        places: the rows and columns whose logits those passes will want; each row's last prompt
            token if None. `sites`: what they will capture.
        stays: behind the block keep them as long as there is room (see `keep_at_most`), for another
            block over exactly these prompts, from this layer on or a later one.
        show: a bar; by default none.
    """
    with steady(model) as memory:
        layout = layout_of(prompts, model)
        rectangle = rectangle_around(prompts, vector, layout, places=places, sites=sites)
        with memory.kept(model, prompts, rectangle, stays=stays, show=show):
            yield


def wide(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """At least float32, for averages and logarithms of short types."""
    return x if x.dtype == torch.float64 else x.float()


def log_probabilities(logits: Float[Tensor, "*batch token"]) -> Float[Tensor, "*batch token"]:
    """Natural logarithms, at least float32."""
    return wide(logits).log_softmax(dim=-1)


def in_batches(
    prompts: Prompts,
    compute: Callable[[Prompts], Tensor],
    *,
    batch_size: int = 64,
    title: str = "prompts",
    show: bool | None = None,
) -> Tensor:
    """Apply `compute` (rows in, rows out) to batches of prompts of like length; rows in order.

    Where memory runs out for a batch, it and those behind it are halved.

    Raises:
        InvalidInput: if `batch_size` is below 1.
    """
    if batch_size < 1:
        raise InvalidInput(f"batch_size={batch_size} is too small; use 1 or more.")
    order = prompts.lengths.argsort(stable=True)
    parts = []
    with progress_bar(title=title, total=len(prompts), show=show) as bar:
        of_rows = in_chunks(order, batch_size, lambda rows: compute(prompts.select(rows.tolist())))
        for rows, found in of_rows:
            parts.append(found)
            bar.update(len(rows))
    return torch.cat(parts)[order.argsort()]


def states_at(
    model: TransformerBridge,
    prompts: Prompts,
    row: Int[Tensor, " place"],
    column: Int[Tensor, " place"],
    vector: TaskVector | None,
) -> Float[Tensor, "place d_model"] | None:
    """The residual streams behind the last block; None where the full pass has to run."""
    row, column = row.cpu(), column.cpu()
    _check_inside(prompts, column)
    layout = layout_of(prompts, model)
    with steady(model) as memory:
        cut = cut_around(memory, model, prompts, vector, layout, places=(row, column))
        if cut is None:
            return None
        with declared_layout(model, cut.suffix.layout(layout)), applied(vector, model):
            states = replay(model, cut.prefix)
        there = row * states.shape[1] + column - cut.suffix.start[row]
        return states.flatten(0, 1).index_select(0, there.to(states.device))


def full_logits_at(
    model: TransformerBridge,
    prompts: Prompts,
    row: Int[Tensor, " place"],
    column: Int[Tensor, " place"],
    vector: TaskVector | None,
) -> Float[Tensor, "place d_vocab"]:
    """The logits at any places, by the full pass."""
    with declared_layout(model, layout_of(prompts, model)), applied(vector, model):
        return full_logits(model, prompts, row.cpu(), column.cpu())


def _check_inside(prompts: Prompts, column: Int[Tensor, " place"]) -> None:
    width = prompts.tokens.shape[1]
    outside = column[(column < 0) | (column >= width)]
    if len(outside):
        raise InvalidInput(
            f"Column {int(outside[0])} does not exist in prompts of {width} columns; use 0 to "
            f"{width - 1}."
        )


def _keep(
    activation: Float[Tensor, "batch pos *feature"],
    hook: HookPoint,
    *,
    taken: dict[Site, Tensor],
    site: Site,
    layout: Layout,
) -> None:
    if site.heads is not None:
        activation = activation[:, :, list(site.heads)]
    if site.positions == "all":
        taken[site] = activation
        return
    chosen = layout.select(site, "prompt")
    row, column, slot = (x.to(activation.device) for x in (chosen.row, chosen.column, chosen.slot))
    empty = activation.new_zeros(activation.shape[0], len(site.positions), *activation.shape[2:])
    taken[site] = empty.index_put((row, slot), activation[row, column])
