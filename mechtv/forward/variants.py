"""Many vectors over the same prompts: heads to ablate, perturbed vectors, layers, one by one.

The prompts run once. Then the vectors are run side by side: each row of prompts carries one copy of
its last columns for each vector, all of them behind one prefix, which is never copied. Edits that
all vectors share are run once too, up to the block where each vector's own begin. Use `run` for one
vector.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Literal, get_args

import torch
from einops import rearrange
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.forward.chunks import in_chunks
from mechtv.forward.memory import Memory, steady
from mechtv.forward.prefix import Prefix, replay
from mechtv.forward.probe import last_residual
from mechtv.forward.rectangle import Rectangle
from mechtv.forward.run import last_logits
from mechtv.forward.setting import layout_of
from mechtv.forward.unembed import unembedded
from mechtv.progress import progress_bar
from mechtv.tasks.prompts import Prompts
from mechtv.vectors.edits import Edit
from mechtv.vectors.inject import check_fits, inject_side_by_side
from mechtv.vectors.layout import ActsOn, Layout
from mechtv.vectors.vector import TaskVector

LARGEST_SHARE = 0.9  # so many passes begin from the prompts that nearly any saving is worth it
MOST_COLUMNS = 256  # more would spend more on attention between variants, all of it masked

Measure = Callable[[Float[Tensor, "batch output"], Prompts], Shaped[Tensor, "batch ..."]]
Output = Literal["logits", "residual"]


def scan(
    model: TransformerBridge,
    prompts: Prompts,
    vectors: Sequence[TaskVector],
    measure: Measure | None = None,
    *,
    output: Output = "logits",
    tokens: Int[Tensor, " token"] | None = None,
    batch_size: int = 64,
    n_bytes: int = 2**30,
    title: str = "vectors",
    show: bool | None = None,
) -> Shaped[Tensor, "vector batch ..."]:
    """What each vector by itself does at each prompt's last token.

    Args:
        vectors: any; those that begin at one layer run together, so give many at once. Edits that
            all of them have are told by identity.
        measure: what is kept of one vector's output on some rows, such as a probability; row by
            row. The output itself if None.
        output: the `logits`, or the `residual` stream behind the last block.
        tokens: the tokens whose logits are wanted; the whole vocabulary if None.
        batch_size: prompts at a time, whose prefixes are kept meanwhile.
        n_bytes: about how much memory the vectors that run together may take, beside the prefixes
            and what is returned. Where it is not there, fewer run together.

    Returns:
        One entry a vector, in their order; each as `measure` returns it, over all prompts.

    Raises:
        InvalidInput: for no vectors, a vector that does not fit the model, an unknown output, or a
            budget or batch size below 1.
    """
    if not vectors:
        raise InvalidInput("There are no vectors to scan; give at least one.")
    if output not in get_args(Output):
        raise InvalidInput(f"output={output!r} is unknown; use {' or '.join(get_args(Output))}.")
    for name, value in (("batch_size", batch_size), ("n_bytes", n_bytes)):
        if value < 1:
            raise InvalidInput(f"{name}={value} is too small; use 1 or more.")
    for vector in vectors:
        for edit in vector.edits:
            check_fits(model, edit)
    batches = prompts.lengths.argsort(stable=True).split(batch_size)
    keep = measure or (lambda found, _: found)
    total = len(vectors) * len(batches)
    with steady(model) as memory, progress_bar(title=title, total=total, show=show) as bar:

        def one_batch(rows: Int[Tensor, " row"]) -> Shaped[Tensor, "vector row ..."]:
            batch = prompts.select(rows.tolist())
            found: dict[int, Tensor] = {}
            for number, each in _each(memory, model, batch, vectors, output, tokens, n_bytes):
                found[number] = keep(each, batch)
                bar.update()
            return torch.stack([found[number] for number in range(len(vectors))])

        parts = [one_batch(rows) for rows in batches]
    return torch.cat(parts, dim=1)[:, torch.cat(list(batches)).argsort().to(parts[0].device)]


def _each(
    memory: Memory,
    model: TransformerBridge,
    prompts: Prompts,
    vectors: Sequence[TaskVector],
    output: Output,
    tokens: Int[Tensor, " token"] | None,
    n_bytes: int,
) -> Iterator[tuple[int, Float[Tensor, "batch output"]]]:
    """Each vector's number and its output, in some order."""
    layout = layout_of(prompts, model)
    touched = [(site, vector.acts_on) for vector in vectors for site in vector.sites]
    rectangle = Rectangle.around(prompts, layout, touched)
    with memory.kept(model, prompts, rectangle, largest=LARGEST_SHARE, show=False):
        cut = memory.cut(model, prompts, rectangle, learning=False)
        if cut is None:
            yield from _one_by_one(model, prompts, enumerate(vectors), output, tokens)
            return
        last = prompts.last - cut.suffix.start
        inner = cut.suffix.layout(layout)
        shared, prefix = _shared(vectors), cut.prefix
        groups = _by_first_layer(vectors, shared)
        several = any(len(group) > 1 for _, group in groups)
        apart = several and memory.stands_side_by_side(model, cut)
        for layer, group in groups:
            prefix = _entering(model, prefix, layer, shared, vectors[0].acts_on, inner)
            size = _at_once(model, prefix, tokens, n_bytes) if apart else 1

            def outputs(some: Int[Tensor, " vector"], prefix: Prefix = prefix) -> Tensor:
                chosen = [vectors[number] for number in some.tolist()]
                states = _side_by_side(model, prefix, chosen, inner, last)
                return states if output == "residual" else unembedded(model, states, tokens)

            for some, found in in_chunks(torch.tensor(group), size, outputs):
                yield from zip(some.tolist(), found, strict=True)


def _entering(
    model: TransformerBridge,
    prefix: Prefix,
    layer: int,
    shared: tuple[Edit, ...],
    acts_on: ActsOn,
    layout: Layout,
) -> Prefix:
    """The prefix from a later layer on, entered by the run under the edits that all share."""
    later = prefix.from_layer(layer)
    if layer == prefix.layer or all(edit.site.layer >= layer for edit in shared):
        return later
    with inject_side_by_side(model, [(shared, acts_on)], layout):
        states = replay(model, prefix, last_layer=layer - 1)
    return replace(later, entering=(states, *later.entering[1:]))


def _side_by_side(
    model: TransformerBridge,
    prefix: Prefix,
    vectors: Sequence[TaskVector],
    layout: Layout,
    last: Int[Tensor, " batch"],
) -> Float[Tensor, "vector batch d_model"]:
    variants = [
        (tuple(edit for edit in vector.edits if edit.site.layer >= prefix.layer), vector.acts_on)
        for vector in vectors
    ]
    with inject_side_by_side(model, variants, layout):
        states = replay(model, prefix.side_by_side(len(vectors)))
    each = rearrange(states, "b (v s) d -> v b s d", v=len(vectors))
    row = torch.arange(len(last), device=each.device)
    return each[:, row, last.to(each.device)]


def _one_by_one(
    model: TransformerBridge,
    prompts: Prompts,
    vectors: Iterable[tuple[int, TaskVector]],
    output: Output,
    tokens: Int[Tensor, " token"] | None,
) -> Iterator[tuple[int, Float[Tensor, "batch output"]]]:
    for number, vector in vectors:
        if output == "residual":
            yield number, last_residual(model, prompts, vector)
        else:
            yield number, last_logits(model, prompts, vector, tokens=tokens)


def _shared(vectors: Sequence[TaskVector]) -> tuple[Edit, ...]:
    """The very edits that all vectors have."""
    if len({vector.acts_on for vector in vectors}) > 1:
        return ()
    common = set.intersection(*({id(edit) for edit in vector.edits} for vector in vectors))
    return tuple(edit for edit in vectors[0].edits if id(edit) in common)


def _by_first_layer(
    vectors: Sequence[TaskVector], shared: tuple[Edit, ...]
) -> list[tuple[int, list[int]]]:
    """The numbers of the vectors whose own edits begin at one layer, layer by layer."""
    common = {id(edit) for edit in shared}

    def first_layer(number: int) -> int:
        edits = vectors[number].edits
        own = [edit for edit in edits if id(edit) not in common]
        return min(edit.site.layer for edit in own or edits)

    order = sorted(range(len(vectors)), key=first_layer)
    return [(layer, list(group)) for layer, group in groupby(order, key=first_layer)]


def _at_once(
    model: TransformerBridge,
    prefix: Prefix,
    tokens: Int[Tensor, " token"] | None,
    n_bytes: int,
) -> int:
    """How many vectors run side by side within the budget; at least one."""
    cfg = model.cfg
    n_tokens = cfg.d_vocab if tokens is None else len(tokens)
    n_rows, length = len(prefix), prefix.length
    activations = length * (8 * cfg.d_model + 4 * (cfg.d_mlp or 4 * cfg.d_model))
    scores = 4 * length * cfg.n_heads * (prefix.width + MOST_COLUMNS)
    each = n_rows * (activations + scores + 3 * n_tokens) * cfg.dtype.itemsize
    return max(1, min(MOST_COLUMNS // length, n_bytes // each))
