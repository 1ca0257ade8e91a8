"""How much the answer loses without one head, by a first-order estimate or by ablation."""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.analysis.head_outputs import Mode, replacements, without
from mechtv.forward.memory import steady
from mechtv.forward.probe import last_residual
from mechtv.forward.run import in_batches, log_probabilities, wide
from mechtv.forward.unembed import unembedded
from mechtv.forward.variants import scan
from mechtv.methods.frozen import frozen
from mechtv.tasks.prompts import Prompts
from mechtv.vectors.site import Site
from mechtv.vectors.vector import TaskVector

Score = Literal["probability", "log-probability"]


def saliencies(
    model: TransformerBridge,
    prompts: Prompts,
    vector: TaskVector,
    layers: Sequence[int],
    score: Score,
    show: bool | None,
) -> Float[Tensor, "layer head query"]:
    """What zeroing each head's output would take from the score, to first order."""

    def saliency(batch: Prompts) -> Float[Tensor, "batch layer head"]:
        outputs: dict[int, Tensor] = {}
        shifts: dict[int, Tensor] = {}

        def shifted(
            z: Float[Tensor, "batch head d_head"], *, layer: int
        ) -> Float[Tensor, "batch head d_head"]:
            outputs[layer] = z.detach()
            shifts[layer] = torch.zeros_like(outputs[layer], requires_grad=True)
            return z + shifts[layer]

        changes = {
            Site(component="z", layer=layer).hook_name: partial(shifted, layer=layer)
            for layer in layers
        }
        states = last_residual(model, batch, vector, changes=changes)
        total = _answer_scores(unembedded(model, states[None])[0], batch, score).sum()
        slopes = torch.autograd.grad(total, [shifts[layer] for layer in layers])
        each = [
            (wide(outputs[layer]) * wide(slope)).sum(dim=-1).cpu().double()
            for layer, slope in zip(layers, slopes, strict=True)
        ]
        return torch.stack(each, dim=1)

    with frozen(model), steady(model):
        found = in_batches(prompts, saliency, title="saliency of heads", show=show)
    return rearrange(found, "query layer head -> layer head query")


def drops(
    model: TransformerBridge,
    prompts: Prompts,
    source: Prompts,
    vector: TaskVector,
    layers: Sequence[int],
    score: Score,
    mode: Mode,
    show: bool | None,
) -> Float[Tensor, "layer head query"]:
    """The score with each head alone ablated, below the score with none."""
    pairs = [(layer, head) for layer in layers for head in range(model.cfg.n_heads)]
    with torch.no_grad(), steady(model):
        values = replacements(model, source, vector, layers, mode, (-1,), show)
        variants = [without(vector, [pair], values, (-1,)) for pair in pairs]
        found = scan(
            model,
            prompts,
            [vector, *variants],
            lambda logits, batch: _answer_scores(logits, batch, score).cpu().double(),
            title="ablated heads",
            show=show,
        )
    return rearrange(
        found[0] - found[1:], "(layer head) query -> layer head query", layer=len(layers)
    )


def _answer_scores(
    logits: Float[Tensor, "batch d_vocab"], prompts: Prompts, score: Score
) -> Float[Tensor, " batch"]:
    answers = prompts.first_answer_tokens.to(logits.device)
    chosen = log_probabilities(logits).gather(1, answers[:, None])[:, 0]
    return chosen if score == "log-probability" else chosen.exp()
