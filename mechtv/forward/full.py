"""The full hooked pass: every block, every column. What the suffix engine is measured against."""

import inspect
from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.forward.setting import device_of
from mechtv.tasks.prompts import Prompts


def full_logits(
    model: TransformerBridge,
    prompts: Prompts,
    row: Int[Tensor, " place"],
    column: Int[Tensor, " place"],
) -> Float[Tensor, "place d_vocab"]:
    """The logits at some places, under whatever hooks the model has."""
    kept = column.unique()
    logits = _logits(model, prompts, kept)
    found = torch.searchsorted(kept, column)
    return logits[row.to(logits.device), found.to(logits.device)]


def pass_through(model: TransformerBridge, prompts: Prompts, *, last_layer: int) -> None:
    """Run the blocks up to `last_layer` for what their hooks see."""
    if last_layer + 1 < model.cfg.n_layers:
        call(model, prompts)(stop_at_layer=last_layer + 1)
    else:
        _logits(model, prompts, prompts.last[:1])


def call(model: TransformerBridge, prompts: Prompts) -> Callable[..., Tensor]:
    """The model on these prompts, waiting for more options."""
    device = device_of(model)
    return partial(model, prompts.tokens.to(device), attention_mask=prompts.mask.long().to(device))


def _logits(
    model: TransformerBridge, prompts: Prompts, kept: Int[Tensor, " kept"]
) -> Float[Tensor, "batch kept d_vocab"]:
    """The logits of some columns, and of no others where the family can do so."""
    if "logits_to_keep" in inspect.signature(model.original_model.forward).parameters:
        return call(model, prompts)(logits_to_keep=kept)
    return call(model, prompts)()[:, kept]
