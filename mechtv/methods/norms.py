"""How large activations are, so that steps and vectors can be given in units of the stream."""

from collections.abc import Sequence

import torch
from einops import rearrange
from transformer_lens.model_bridge import TransformerBridge

from mechtv.forward.run import capture
from mechtv.tasks.prompts import Prompts
from mechtv.vectors.site import Site

N_PROMPTS = 64


def residual_norms(
    model: TransformerBridge, prompts: Prompts, sites: Sequence[Site]
) -> list[list[float]]:
    """For each site and each of its positions the mean norm of the activations there.

    The mean is over the first 64 prompts. Positions are apart because they differ: the first token
    of a text is often an attention sink, with a norm many times that of the others.

    For LayerNorm models the norm is that of the centred vector, since only that is seen. For
    `"all"` positions it is taken at the last token.
    """
    some = prompts.select(range(min(len(prompts), N_PROMPTS)))
    places = [
        Site(component=s.component, layer=s.layer) if s.positions == "all" else s for s in sites
    ]
    with torch.no_grad():
        activations = capture(model, some, places)
    centred = "LN" in str(model.cfg.normalization_type)
    norms = []
    for place in places:
        flat = rearrange(activations[place], "batch slot ... -> batch slot (...)").cpu().double()
        if centred and place.component != "z":
            flat = flat - flat.mean(dim=-1, keepdim=True)
        norms.append(flat.norm(dim=-1).mean(dim=0).tolist())
    return norms
