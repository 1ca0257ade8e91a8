"""Paired states: the same queries zero-shot and in context, at the last token of one site.

The material of every map from zero-shot to in-context states. The queries are unlabelled: only the
demonstrations' answers are read.
"""

from operator import index
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.forward.run import capture, in_batches
from mechtv.tasks.example import Example
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import SplitName, Task, draw_demonstrations
from mechtv.vectors.inject import hook_point
from mechtv.vectors.site import Component, Site

Demonstrations = Literal["fixed", "per query"]
Paired = tuple[Float[Tensor, "query d_model"], Float[Tensor, "query d_model"]]
LEAST_QUERIES = 2


def paired_states(
    model: TransformerBridge,
    task: Task,
    site: Site,
    *,
    shots: int,
    n: int,
    split: SplitName = "train",
    seed: int = 0,
    demonstrations: Demonstrations = "fixed",
    after_norm: bool = False,
    progress: bool | None = None,
) -> Paired:
    """The states of up to `n` queries without and with demonstrations.

    Args:
        site: one position of a component that is `d_model` wide.
        shots: how many demonstrations, all labels together; they come from `train`.
        n: how many queries; fewer if the split holds fewer besides the fixed demonstrations.
        split: where the queries come from: its first examples that are not fixed demonstrations.
        demonstrations: one `fixed` set before every query, or another one `per query`.
        after_norm: read behind the final norm what the last block puts out, which is Hugging Face's
            `hidden_states[-1]`.

    Returns:
        Zero-shot and in-context states, query by query, at least float32.

    Raises:
        InvalidInput: for a site without states of that form, no shots, too few queries, prompts
            that exceed the context, or states that are not finite.
    """
    _check_site(model, site, after_norm)
    queries, shown = paired_queries(
        task, shots=shots, n=n, split=split, seed=seed, demonstrations=demonstrations
    )

    def states(rows: list[tuple[Example, ...]], title: str) -> Float[Tensor, "query d_model"]:
        prompts = Prompts.from_examples(model, task, queries, rows)
        with torch.no_grad():
            found = in_batches(
                prompts,
                lambda batch: _last_states(model, batch, site, after_norm),
                title=f"{title} states of {task.name}",
                show=progress,
            )
        if not bool(found.isfinite().all()):
            raise InvalidInput(
                f"The {title} states at {site} are not all finite; open the model in float32."
            )
        return found

    return states([()] * len(queries), "zero-shot"), states(shown, f"{shots}-shot")


def paired_queries(
    task: Task,
    *,
    shots: int,
    n: int,
    split: SplitName = "train",
    seed: int = 0,
    demonstrations: Demonstrations = "fixed",
) -> tuple[tuple[Example, ...], list[tuple[Example, ...]]]:
    """The queries of `paired_states`, and the demonstrations before each."""
    if demonstrations not in get_args(Demonstrations):
        raise InvalidInput(
            f"demonstrations={demonstrations!r} is unknown; use 'fixed' or 'per query'."
        )
    if shots < 1:
        raise InvalidInput(f"shots={shots} leaves nothing to fit; use 1 or more demonstrations.")
    if n < LEAST_QUERIES:
        raise InvalidInput(f"n={n} queries are too few to fit a map; use {LEAST_QUERIES} or more.")
    examples, pool = task.split(split, seed=seed), task.splits(seed).train
    if demonstrations == "per query":
        queries = examples[:n]
        shown = [draw_demonstrations(task, pool, query, shots, seed=seed) for query in queries]
    else:
        fixed = draw_demonstrations(task, pool, None, shots, seed=seed)
        taken = {example.key for example in fixed}
        queries = tuple(example for example in examples if example.key not in taken)[:n]
        shown = [fixed] * len(queries)
    if len(queries) < LEAST_QUERIES:
        raise InvalidInput(
            f"The {split} split of {task.name!r} holds {len(examples)} examples; besides shots="
            f"{shots} demonstrations {len(queries)} of them are left as queries, and a map needs "
            f"{LEAST_QUERIES} or more: use fewer shots."
        )
    return queries, shown


def last_token_site(model: TransformerBridge, layer: int | None, component: Component) -> Site:
    """The last token of a layer; of the last block if None."""
    layer = model.cfg.n_layers - 1 if layer is None else index(layer)
    return Site(component=component, layer=layer)


def _last_states(
    model: TransformerBridge, batch: Prompts, site: Site, after_norm: bool
) -> Float[Tensor, "batch d_model"]:
    states = capture(model, batch, [site])[site][:, 0]
    if after_norm:
        states = model.ln_final(states[None])[0]
    return states if states.dtype == torch.float64 else states.float()


def _check_site(model: TransformerBridge, site: Site, after_norm: bool) -> None:
    hook_point(model, site)
    if site.component == "z":
        raise InvalidInput("A map acts on d_model vectors; it cannot stand at z.")
    if site.positions == "all" or len(site.positions) != 1:
        raise InvalidInput(f"A map is fitted at one position, but {site} has others; use -1.")
    last = model.cfg.n_layers - 1
    if after_norm and (site.layer, site.component) != (last, "resid_post"):
        raise InvalidInput(
            f"The final norm stands behind resid_post of layer {last}, so a fit after the norm "
            f"cannot be at {site.component} of layer {site.layer}; use that site, or "
            "fit='same site'."
        )
