"""What every pass begins with: its device, the layout of its columns, the vector over it."""

from contextlib import AbstractContextManager, nullcontext

import torch
from transformer_lens.model_bridge import TransformerBridge

from mechtv.tasks.prompts import Prompts
from mechtv.vectors.layout import Layout
from mechtv.vectors.vector import TaskVector


def device_of(model: TransformerBridge) -> torch.device:
    """The device that takes the model's tokens."""
    return torch.device(model.cfg.device or "cpu")


def layout_of(prompts: Prompts, model: TransformerBridge) -> Layout:
    """The layout of one full pass over the prompts: what follows `last` counts as new tokens."""
    column = torch.arange(prompts.tokens.shape[1])
    in_prompt = column <= prompts.last[:, None]
    device = device_of(model)
    return Layout(
        prompt=(prompts.mask & in_prompt).to(device), new=(prompts.mask & ~in_prompt).to(device)
    )


def applied(
    vector: TaskVector | None, model: TransformerBridge
) -> AbstractContextManager[TransformerBridge]:
    """The model under a vector, or as it is where there is none."""
    return nullcontext(model) if vector is None else vector.applied(model)
