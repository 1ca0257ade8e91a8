"""Why a pass may not be cut: whatever would make a part of it differ from the whole."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge

_STACK = ("transformer_lens.", "transformers.", "accelerate.")
_WIRING = "transformer_lens.model_bridge.component_setup"  # parts of a model, in the form of hooks
_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def lasting_obstacle(model: TransformerBridge) -> str | None:
    """What stands in the way as long as nobody changes the model."""
    if any(module.training for module in model.original_model.modules()):
        return "the model is in training mode, where dropout may act"
    if any(getattr(torch_modules, f"_global{kind}") for kind in _KINDS):
        return "a hook stands on all modules of torch"
    for module in dict.fromkeys([*model.modules(), *model.original_model.modules()]):
        foreign = [hook for hook in _module_hooks(module) if not _of_the_stack(hook)]
        if foreign and not isinstance(module, HookPoint):
            return f"a hook stands on the model's {type(module).__name__}"
    return None


def passing_obstacle(points: Iterable[HookPoint], weights: Iterable[nn.Parameter]) -> str | None:
    """What may stand in the way of one pass and not of the next: on these points, these weights."""
    for point in points:
        any_hook = (
            point._forward_hooks
            or point._forward_pre_hooks
            or point._backward_hooks
            or point._backward_pre_hooks
        )
        if any_hook and _by_a_user(point):
            return f"a hook stands at {point.name}"
    if torch.is_grad_enabled() and any(w.requires_grad for w in weights):
        return "gradients of the weights are wanted; freeze them, or use torch.no_grad()"
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return "autocast is on"
    return None


def _by_a_user(point: HookPoint) -> bool:
    added = [*point.fwd_hooks, *point.bwd_hooks]
    by_torch = len(list(_module_hooks(point))) - len(added)
    return bool(by_torch) or any(getattr(h.user_hook, "__module__", "") != _WIRING for h in added)


def _module_hooks(module: nn.Module) -> Iterator[object]:
    for kind in _KINDS:
        yield from getattr(module, kind).values()


def _of_the_stack(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(_STACK)
