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
    """The final norm, the unembedding and the soft cap, for some tokens or the whole vocabulary."""
    normed = model.ln_final(states)
    if tokens is None:
        with few_rows([model.unembed.original_component]):
            logits: Tensor = model.unembed(normed)
    else:
        chosen = tokens.to(normed.device)
        logits = normed @ model.W_U[:, chosen]
        if model.b_U is not None:
            logits = logits + model.b_U[chosen]
    cap = soft_cap(model)
    return cap * torch.tanh(logits / cap) if cap else logits


def soft_cap(model: TransformerBridge) -> float:
    """What bounds the model's logits (Gemma 2); 0 where nothing does."""
    return max(0.0, getattr(model.cfg, "output_logits_soft_cap", None) or 0.0)
