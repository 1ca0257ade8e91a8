"""Let a float64 model compute in float64 throughout.

Hugging Face and the bridge send softmax, norms and rotary angles through float32 whatever the
weights are. In a float64 model that leaves errors of 1e-6, and makes the logits of left-padded rows
NaN: what a mask adds at padding, -1.8e308, is infinite in float32.
"""

import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformer_lens.hook_points import HookPoint

_THREAD = threading.local()


def compute_in_double(model: nn.Module) -> None:
    """Let every module of a float64 model stay in float64, also when it is called alone."""
    for module in model.modules():
        if not isinstance(module, HookPoint) and "forward" not in vars(module):
            kind: Any = type(module)
            # not setattr: components of the bridge hand that on to the module they wrap
            vars(module)["forward"] = MethodType(_in_double(kind), module)


class _Double(TorchFunctionMode):
    """Inside, what asks for float32 of a float64 tensor gets float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@functools.cache
def _in_double(kind: type[nn.Module]) -> Callable[..., Any]:
    """A class's `forward` within `_Double`, for modules to have as their own method.

    A method, unlike a function around one module's `forward`, is copied with its module.
    """

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if getattr(_THREAD, "inside", False):
            return kind.forward(self, *args, **kwargs)
        _THREAD.inside = True
        try:
            with _Double():
                return kind.forward(self, *args, **kwargs)
        finally:
            _THREAD.inside = False

    return forward
