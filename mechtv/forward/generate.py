"""What the model writes after its prompts, under a vector."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.forward.setting import applied, device_of
from mechtv.tasks.prompts import Prompts
from mechtv.vectors.layout import last_real
from mechtv.vectors.vector import TaskVector


def greedy(
    model: TransformerBridge, prompts: Prompts, vector: TaskVector | None = None, *, new_tokens: int
) -> Int[Tensor, "batch new"]:
    """The next `new_tokens` tokens of each prompt, each the most probable one.

    Generation goes on behind an end-of-sequence token; cut the text where you want it to end.
    """
    width = prompts.tokens.shape[1]
    columns = (torch.arange(width) + last_real(prompts.mask)[:, None] + 1) % width  # padding left
    tokens, mask = (
        x.take_along_dim(columns, dim=1).to(device_of(model))
        for x in (prompts.tokens, prompts.mask)
    )
    with torch.no_grad(), applied(vector, model):
        written: Any = model.generate(
            tokens,
            attention_mask=mask.long(),
            max_new_tokens=new_tokens,
            do_sample=False,
            stop_at_eos=False,
            verbose=False,
            return_type="tokens",
        )
    new: Tensor = written[:, width:]
    return new
