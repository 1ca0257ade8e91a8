"""The log-probabilities of given tokens, for training: no distribution is kept for the gradient.

The vocabulary is by far the widest axis of a pass. Through `log_softmax` a training step writes and
reads it half a dozen times; here the gradient is finished in the forward pass, and what is left is
one vector for each token.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.forward.linear import few_rows, is_eligible, product
from mechtv.forward.run import full_logits_at, log_probabilities, states_at, wide
from mechtv.forward.unembed import changes_logits, unembedded
from mechtv.tasks.prompts import Prompts
from mechtv.vectors.vector import TaskVector


def log_probabilities_at(
    model: TransformerBridge,
    prompts: Prompts,
    row: Int[Tensor, " place"],
    column: Int[Tensor, " place"],
    ids: Int[Tensor, " place"],
    vector: TaskVector | None = None,
) -> Float[Tensor, " place"]:
    """The log-probability of one token at each place, at least float32; once differentiable.

    Args:
        row, column: the places, as for `logits_at`. `ids`: each one's token.
    """
    states = states_at(model, prompts, row, column, vector)
    if states is not None:
        return token_log_probabilities(model, states, ids)
    return _of_tokens(full_logits_at(model, prompts, row, column, vector), ids)


def token_log_probabilities(
    model: TransformerBridge,
    states: Float[Tensor, "token d_model"],
    ids: Int[Tensor, " token"],
) -> Float[Tensor, " token"]:
    """The log-probability (natural, at least float32) of one token for each state.

    Args:
        states: residual streams behind the last block. Once differentiable in them.
    """
    ids = ids.to(states.device)
    if changes_logits(model):
        return _of_tokens(unembedded(model, states[None])[0], ids)
    found: Tensor = _Chosen.apply(model.ln_final(states), ids, model)  # type: ignore[no-untyped-call]
    return found


class _Chosen(torch.autograd.Function):
    """log softmax(x W_U) at one token a row."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Float[Tensor, "token d_model"],
        ids: Int[Tensor, " token"],
        model: TransformerBridge,
    ) -> Float[Tensor, " token"]:
        layer = model.unembed.original_component
        with few_rows([layer]):
            logits = wide(model.unembed(x))
        own = logits.gather(1, ids[:, None])[:, 0]
        norm = logits.logsumexp(dim=1)
        if ctx.needs_input_grad[0]:
            weight = model.W_U
            shares = logits.sub_(norm[:, None]).exp_().to(x.dtype)
            mean = product(shares, weight) if is_eligible(layer) else shares @ weight.T
            ctx.slope = weight.T[ids] - mean
        return own - norm

    @staticmethod
    def backward(ctx: Any, gradient: Float[Tensor, " token"]) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():  # as under create_graph, where the slope would pass as constant
            raise RuntimeError("These log-probabilities can be differentiated only once.")
        slope: Tensor = ctx.slope
        return gradient.to(slope.dtype)[:, None] * slope, None, None


def _of_tokens(
    logits: Float[Tensor, "token d_vocab"], ids: Int[Tensor, " token"]
) -> Float[Tensor, " token"]:
    return log_probabilities(logits).gather(1, ids.to(logits.device)[:, None])[:, 0]
