"""Train beside a model without leaving a trace on it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformer_lens.model_bridge import TransformerBridge


@contextmanager
def frozen(model: TransformerBridge) -> Iterator[None]:
    """Gradients on, the model's weights out of the graph, dropout off; all restored afterwards.

    Works inside `torch.no_grad()`, `torch.inference_mode()` and after `set_grad_enabled(False)`.
    Denormal numbers are flushed meanwhile: float32 gradients reach them, and they are slow.
    """
    modules = list(model.original_model.modules())
    flags = [(weight, weight.requires_grad) for weight in model.original_model.parameters()]
    modes = [(module, module.training) for module in modules]
    flushed = _flushes_denormals()
    try:
        for weight, _ in flags:
            weight.requires_grad_(False)
        for module in modules:
            module.training = False
        torch.set_flush_denormal(True)
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_flush_denormal(flushed)
        for weight, flag in flags:
            weight.requires_grad_(flag)
        for module, mode in modes:
            module.training = mode


def _flushes_denormals() -> bool:
    smallest_normal = torch.tensor(torch.finfo(torch.float64).tiny, dtype=torch.float64)
    return bool(smallest_normal / 2 == 0)
