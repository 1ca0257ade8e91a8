"""A stamp that changes when a model's weights do, however they were changed."""

import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

Stamp = tuple[object, ...]


def stamp(model: TransformerBridge) -> Stamp:
    """A checksum of every weight and buffer, and where each lies.

    Autograd's version counters do not see writes through `.data`, so the numbers are read: each
    tensor is projected on fixed vectors, which also tells a permutation of its rows or columns.
    """
    tensors = [*model.original_model.parameters(), *model.original_model.buffers()]
    with torch.no_grad():
        sums = [_projection(x) for x in tensors if not x.is_meta]
    where = tuple((x.data_ptr(), tuple(x.shape), x.dtype) for x in tensors if not x.is_meta)
    values = tuple(torch.stack([x.cpu() for x in sums]).tolist()) if sums else ()
    return where, values


def _projection(x: Tensor) -> Tensor:
    wide = x.detach() if x.dtype in (torch.float32, torch.float64) else x.detach().float()
    for _ in range(x.ndim):
        wide = wide @ _direction(wide)
    return wide.double()


def _direction(x: Tensor) -> Tensor:
    steps = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=torch.float64)
    return torch.cos(steps * steps).to(x.dtype)
