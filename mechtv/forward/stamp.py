"""A stamp that changes when a model does, however it was changed."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge

Stamp = tuple[object, ...]

_PLAIN = (bool, int, float, str)
_WRITTEN_BY_PASSES = {
    "training",
    "_output_capturing_hooks_installed",
    "_capture_hook_handles",
    "_capture_hooks_wired",
    "_fired_hook_out",
    "_suppress_next_hook_in",
}


def stamp(model: TransformerBridge) -> Stamp:
    """A checksum of every weight and buffer, where each lies, and every module's plain settings.

    Autograd's version counters do not see writes through `.data`, so the numbers are read: each
    tensor is projected on fixed vectors, which also tells a permutation of its rows or columns.
    """
    inner = model.original_model
    tensors = [x for x in (*inner.parameters(), *inner.buffers()) if not x.is_meta]
    with torch.no_grad():
        sums = torch.stack([_projection(x).cpu() for x in tensors]).tolist() if tensors else []
    where = tuple((x.data_ptr(), tuple(x.shape), x.dtype) for x in tensors)
    return where, tuple(sums), tuple(_settings(module) for module in inner.modules())


def checksum(model: TransformerBridge) -> str:
    """The weights in a few letters, equal for equal weights on any machine.

    It is made of six digits a tensor: what differs by rounding alone may pass for the same.
    """
    weights = dict(model.original_model.named_parameters())
    with torch.no_grad():
        sums = {name: f"{float(_projection(x)):.5e}" for name, x in sorted(weights.items())}
    return hashlib.sha256(repr(sums).encode()).hexdigest()[:16]


def versions(weights: Iterable[nn.Parameter]) -> int:
    """A number that grows with every write to a weight, but for those through `.data`."""
    return sum(weight._version for weight in weights if not weight.is_inference())


def _settings(module: nn.Module) -> tuple[object, ...]:
    own = vars(module)
    plain = tuple(
        (name, tuple(value) if isinstance(value, list) else value)
        for name, value in own.items()
        if name not in _WRITTEN_BY_PASSES and _is_plain(value)
    )
    return id(type(module)), id(own.get("forward")), plain


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(isinstance(item, _PLAIN) for item in value)
    return isinstance(value, _PLAIN)


def _projection(x: Tensor) -> Tensor:
    wide = x.detach() if x.dtype in (torch.float32, torch.float64) else x.detach().float()
    for _ in range(x.ndim):
        wide = wide @ _direction(wide)
    return wide.double()


def _direction(x: Tensor) -> Tensor:
    steps = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=torch.float64)
    return torch.cos(steps * steps).to(x.dtype)
