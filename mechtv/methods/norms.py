"""How large activations are, so that steps and vectors can be given in units of the stream."""

from collections.abc import Sequence

import torch
from transformer_lens.model_bridge import TransformerBridge

from mechtv.forward.run import capture
from mechtv.tasks.prompts import Prompts
from mechtv.vectors.site import Site

N_PROMPTS = 64


def residual_norms(
    model: TransformerBridge, prompts: Prompts, sites: Sequence[Site]
) -> list[float]:
    """The mean norm of the activations at each site, over the first 64 prompts.

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
        flat = activations[place].double().flatten(start_dim=2)
        if centred and place.component != "z":
            flat = flat - flat.mean(dim=-1, keepdim=True)
        norms.append(float(flat.norm(dim=-1).mean()))
    return norms
