"""What a vector says in words: the final norm, then the unembedding (the logit lens).

The norm is recomputed on the vector itself, as on any state (METHODS, section 4).
"""

import pandas as pd
import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.forward.unembed import unembedded
from mechtv.vectors.vector import TaskVector


def lens_logits(
    model: TransformerBridge, states: Float[Tensor, "state d_model"]
) -> Float[Tensor, "state d_vocab"]:
    """The logits that each state would give if it stood before the final norm."""
    weight = next(model.unembed.parameters())
    with torch.no_grad():
        return unembedded(model, states.to(weight.device, weight.dtype)[None])[0]


def top_tokens(model: TransformerBridge, vector: TaskVector, *, k: int = 8) -> pd.DataFrame:
    """The `k` most favoured tokens of each of a vector's values in the residual stream.

    Returns:
        One row a (layer, position, rank): the token as text, and its logit.

    Raises:
        InvalidInput: if the vector has no value that lives in the residual stream.
    """
    rows = []
    for edit in vector.edits:
        value = edit.operation.tensors().get("value")
        if value is None or edit.site.component == "z":
            continue
        states = rearrange(value.detach(), "... d_model -> (...) d_model")
        logits = lens_logits(model, states)
        best = logits.topk(k, dim=-1)
        places = edit.site.positions if value.ndim == 2 else (str(edit.site.positions),)
        for place, ids, values in zip(places, best.indices, best.values, strict=True):
            rows += [
                {
                    "layer": edit.site.layer,
                    "position": place,
                    "rank": rank,
                    "token": model.tokenizer.decode([int(token)]),
                    "logit": float(value),
                }
                for rank, (token, value) in enumerate(zip(ids, values, strict=True), start=1)
            ]
    if not rows:
        raise InvalidInput(f"{vector} has no value in the residual stream to read with the lens.")
    return pd.DataFrame(rows)
