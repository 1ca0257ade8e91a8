"""Heads ablated by what they write for another query, each query with a donor of its own."""

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.analysis.circuits import Head
from mechtv.analysis.head_outputs import Values, by_layer
from mechtv.errors import InvalidInput
from mechtv.forward.probe import Change, last_residual
from mechtv.forward.run import in_batches, kept
from mechtv.forward.unembed import unembedded
from mechtv.forward.variants import Measure
from mechtv.seeds import python_rng
from mechtv.tasks.prompts import Prompts
from mechtv.vectors.site import Site
from mechtv.vectors.vector import TaskVector


def donors_of(prompts: Prompts, source: Prompts, seed: int) -> list[int]:
    """For each query the number of a training query, never itself."""
    rng = python_rng(seed, "whose head outputs a query gets")
    numbers = {example.key: number for number, example in enumerate(source.examples)}
    chosen = []
    for example in prompts.examples:
        others = [number for key, number in numbers.items() if key != example.key]
        if not others:
            raise InvalidInput("There is no other training query to resample from; raise n_train.")
        chosen.append(rng.choice(others))
    return chosen


def scan_resampled(
    model: TransformerBridge,
    prompts: Prompts,
    vector: TaskVector,
    sets: Sequence[tuple[Head, ...]],
    layers: Sequence[int],
    donors: Float[Tensor, "query layer head d_head"],
    score: Measure,
    show: bool | None,
) -> Float[Tensor, "set query score"]:
    """The scores with each set's outputs, at each query's last token, taken from its donor."""
    row = {example.key: number for number, example in enumerate(prompts.examples)}
    first = min(*layers, *(site.layer for site in vector.sites))
    place = vector.placed([first])

    def compute(batch: Prompts) -> Float[Tensor, "batch set score"]:
        own = donors[[row[example.key] for example in batch.examples]]
        values = dict(zip(layers, own.unbind(dim=1), strict=True))
        with kept(model, batch, place):
            found = [
                last_residual(model, batch, vector, changes=_exchanges(some, values))
                for some in sets
            ]
        return torch.stack([score(unembedded(model, x[None])[0], batch) for x in found], dim=1)

    return in_batches(prompts, compute, title="head sets", show=show).transpose(0, 1)


def _exchanges(heads: Sequence[Head], values: Values) -> dict[str, Change]:
    def exchanged(
        z: Float[Tensor, "batch head d_head"], *, own: tuple[int, ...], layer: int
    ) -> Float[Tensor, "batch head d_head"]:
        index = torch.tensor(own, device=z.device)
        return z.index_copy(1, index, values[layer].to(z).index_select(1, index))

    return {
        Site(component="z", layer=layer).hook_name: partial(exchanged, own=own, layer=layer)
        for layer, own in by_layer(heads).items()
    }
