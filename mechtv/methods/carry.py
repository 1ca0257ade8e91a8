"""Carry a vector from one model to another, of any width and any tokenizer.

Values go through the map M between the two residual streams (docs/methods.md, "linear, across
models"), sites to the same relative depth. A vector applied to a model of another width as it is,
is an error.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Literal, get_args

import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.methods.norms import N_PROMPTS, residual_norms
from mechtv.methods.unembedding_map import UnembeddingMap, unembedding_map
from mechtv.models import describe
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import Task
from mechtv.vectors.card import Card
from mechtv.vectors.edits import Add, Affine, Edit, Linear, Operation, Replace
from mechtv.vectors.inject import check_fits
from mechtv.vectors.site import Site
from mechtv.vectors.vector import TaskVector

Rescale = Literal["norm", "none"]

CARRIED = (Add, Replace, Affine, Linear)


def carry_vector(
    vector: TaskVector,
    large: TransformerBridge,
    small: TransformerBridge,
    task: Task,
    *,
    layer: int | None = None,
    rescale: Rescale = "norm",
    mapping: UnembeddingMap | None = None,
    seed: int = 0,
) -> TaskVector:
    """The vector of the large model as one for the small model.

    Args:
        task: on whose zero-shot training queries (at most 64) the streams are measured.
        layer: the small model's layer; the same relative depth if None.
        rescale: `norm` multiplies each value by the small stream's size over the large one's at the
            two sites, a size being the mean norm / sqrt(width): logits see the stream divided by
            that, so M maps directions and the two sizes set the length. `none` takes M v.
        mapping: from `unembedding_map`, with which this is quick; made anew if None.
        seed: fixes the task's splits.

    Returns:
        A vector for the small model; its card holds the source's.

    Raises:
        InvalidInput: as `carry`; for an unknown `rescale`, if the vector does not fit the large
            model, or for a map between other models.
    """
    if rescale not in get_args(Rescale):
        raise InvalidInput(f"rescale={rescale!r} is unknown; use 'norm' or 'none'.")
    for edit in vector.edits:
        check_fits(large, edit)
    if mapping is None:
        mapping = unembedding_map(large, small)
    else:
        _check_between(mapping, large, small)
    sites = [_carried_site(edit.site, mapping, layer) for edit in vector.edits]
    factors = [1.0] * len(sites)
    if rescale == "norm":
        sizes = [_sizes(large, task, vector.sites, seed), _sizes(small, task, sites, seed)]
        factors = [there / here for here, there in zip(*sizes, strict=True)]
    return carry(vector, mapping, layer=layer, factor=factors)


def carry(
    vector: TaskVector,
    mapping: UnembeddingMap,
    *,
    layer: int | None = None,
    factor: float | Sequence[float] = 1.0,
) -> TaskVector:
    """The vector under a map: v -> factor M v for values and biases, W -> M W M^+ for matrices.

    Args:
        mapping: from `unembedding_map`.
        layer: the small model's layer, for a vector at one layer; the same relative depth (first
            to first, last to last) if None.
        factor: for all edits, or one for each.

    Returns:
        A vector for the small model; its card holds the source's, the map and the factors.

    Raises:
        InvalidInput: if the vector is not of the large model's width, acts on heads or holds an
            MLP, the layer does not exist or is one for several, factors are missing, or several
            edits that do not add meet at one site.
    """
    layers = sorted({site.layer for site in vector.sites})
    if layer is not None and len(layers) > 1:
        raise InvalidInput(
            f"layer={layer} names one layer, but this vector acts at layers "
            f"{', '.join(map(str, layers))}; leave layer out for the same relative depths."
        )
    if isinstance(factor, (int, float)):
        factors = [float(factor)] * len(vector.edits)
    else:
        factors = [float(own) for own in factor]
    if len(factors) != len(vector.edits):
        raise InvalidInput(
            f"{len(factors)} factors were given for {len(vector.edits)} edits; give one for each, "
            "or one number."
        )
    edits = [
        _carried(edit, mapping, layer, own) for edit, own in zip(vector.edits, factors, strict=True)
    ]
    _check_apart(edits)
    return TaskVector(
        edits=tuple(edits),
        card=_card(vector.card, mapping, layer, factors),
        acts_on=vector.acts_on,
    )


def _carried(edit: Edit, mapping: UnembeddingMap, layer: int | None, factor: float) -> Edit:
    site = _carried_site(edit.site, mapping, layer)
    if edit.width != mapping.matrix.shape[1]:
        raise InvalidInput(
            f"This vector has width {edit.width} but the map takes vectors of "
            f"{mapping.large.name!r}, whose width is {mapping.matrix.shape[1]}; make a map for the "
            "model that the vector is from."
        )
    return Edit(site=site, operation=_carried_operation(edit.operation, mapping, factor))


def _carried_operation(operation: Operation, mapping: UnembeddingMap, factor: float) -> Operation:
    if type(operation) not in CARRIED:
        raise InvalidInput(
            f"A {type(operation).__name__} edit cannot be carried: it is no value and no matrix; "
            f"only {', '.join(kind.__name__ for kind in CARRIED)} edits can."
        )

    def moved(name: str, tensor: Tensor) -> Tensor:
        wide = tensor.detach().cpu().double()
        if name == "matrix":
            wide = mapping.matrix @ wide @ mapping.inverse
        elif name in ("value", "bias"):
            wide = factor * wide @ mapping.matrix.T
        return wide.to(tensor.device, torch.promote_types(tensor.dtype, torch.float32))

    return replace(operation, **{name: moved(name, x) for name, x in operation.tensors().items()})


def _carried_site(site: Site, mapping: UnembeddingMap, layer: int | None) -> Site:
    if site.component == "z":
        raise InvalidInput(
            "The map is one between residual streams, but this vector acts on heads (z), which "
            "another model has not; carry a vector at resid_pre, resid_post, attn_out or mlp_out."
        )
    n_layers = mapping.small.n_layers
    if layer is None:
        layer = round(site.layer * (n_layers - 1) / max(mapping.large.n_layers - 1, 1))
    if layer >= n_layers:
        raise InvalidInput(
            f"layer={layer} does not exist: {mapping.small.name!r} has layers 0 to {n_layers - 1}."
        )
    return replace(site, layer=layer)


def _check_between(
    mapping: UnembeddingMap, large: TransformerBridge, small: TransformerBridge
) -> None:
    for about, model in ((mapping.large, large), (mapping.small, small)):
        own = describe(model)
        if replace(about, dtype=own.dtype) != own:
            raise InvalidInput(
                f"The map goes from {mapping.large.name!r} to {mapping.small.name!r}, and not from "
                f"{describe(large).name!r} to {describe(small).name!r}; leave it out, or make one "
                "with unembedding_map(large, small)."
            )


def _check_apart(edits: Sequence[Edit]) -> None:
    """Values that are added may meet at one site; of others, one would undo or repeat another."""
    counts = Counter(edit.site for edit in edits)
    for edit in edits:
        if counts[edit.site] > 1 and not isinstance(edit.operation, Add):
            raise InvalidInput(
                f"{counts[edit.site]} edits would meet at {edit.site}, and {edit.operation_name!r} "
                "edits cannot be joined; carry a vector with edits at fewer layers."
            )


def _card(
    source: Card, mapping: UnembeddingMap, layer: int | None, factors: Sequence[float]
) -> Card:
    about = mapping.small
    made_of = {
        "n_tokens": mapping.n_tokens,
        "relative_error": mapping.relative_error,
        "fold_norm": mapping.fold_norm,
        "ridge": mapping.ridge,
        "large": asdict(mapping.large),
    }
    return Card(
        method="carried",
        settings={"layer": layer, "factors": list(factors), "map": made_of},
        model=about.name,
        model_revision=about.revision,
        weights=about.weights,
        task=source.task,
        template=source.template,
        seed=source.seed,
        dtype=about.dtype,
        sources=(source,),
    )


def _sizes(model: TransformerBridge, task: Task, sites: Sequence[Site], seed: int) -> list[float]:
    """For each site the mean norm over its positions, in units of sqrt(width)."""
    n = min(N_PROMPTS, len(task.splits(seed).train))
    prompts = Prompts.of(model, task, split="train", n=n, seed=seed)
    norms = residual_norms(model, prompts, sites)
    return [sum(each) / len(each) / model.cfg.d_model**0.5 for each in norms]
