"""What states behind the last block say of the answers, some queries at a time.

The logits of all queries at once would be as many numbers as queries times the vocabulary.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.analysis.answers import Answers
from mechtv.analysis.lens import ROWS, lens_logits
from mechtv.tasks.prompts import Prompts


def answers_of(
    model: TransformerBridge,
    states: Float[Tensor, "query d_model"],
    prompts: Prompts,
    against: Int[Tensor, "query rival"] | None = None,
) -> Answers:
    """The answers that the final norm and the unembedding give to each query's state.

    Args:
        against: each query's rivals; those that its own logits show if None.
    """
    parts = []
    for rows in torch.arange(len(prompts)).split(ROWS):
        logits = lens_logits(model, states[rows.to(states.device)])
        rivals = None if against is None else against[rows.to(against.device)]
        parts.append(Answers.of(logits, prompts.select(rows.tolist()), rivals).columns())
    return Answers.of_columns(torch.cat(parts), closed=bool(prompts.labels))
