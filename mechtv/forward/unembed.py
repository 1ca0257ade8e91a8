"""From the residual stream behind the last block to logits."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.forward.linear import few_rows


def unembedded(
    model: TransformerBridge,
    states: Float[Tensor, "batch pos d_model"],
    tokens: Int[Tensor, " token"] | None = None,
) -> Float[Tensor, "batch pos token"]:
    """The logits of some tokens or of the whole vocabulary.

    The final norm, the unembedding, and what the family does to its logits: the soft cap of
    Gemma 2, the factor of Cohere and Granite.
    """
    normed = model.ln_final(states)
    if tokens is None:
        with few_rows([model.unembed.original_component]):
            logits: Tensor = model.unembed(normed)
    else:
        chosen = tokens.to(normed.device)
        logits = normed @ model.W_U[:, chosen]
        if model.b_U is not None:
            logits = logits + model.b_U[chosen]
    changed: Tensor = model.adapter.apply_output_logits_transform(logits)
    return changed


def logit_factor(model: TransformerBridge) -> float:
    """What a family multiplies its logits by (Cohere, Granite); a soft cap leaves small ones be."""
    small = torch.tensor(2.0**-30, dtype=torch.float64)
    return float(model.adapter.apply_output_logits_transform(small) / small)


def changes_logits(model: TransformerBridge) -> bool:
    """Whether logits are more than the unembedding of the normed stream: capped, or scaled."""
    probe = torch.tensor([1.0, 64.0])
    return not torch.equal(model.adapter.apply_output_logits_transform(probe), probe)
