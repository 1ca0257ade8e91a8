"""That a method leaves the model as it was."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformer_lens.model_bridge import TransformerBridge


@contextmanager
def left_alone(model: TransformerBridge) -> Iterator[None]:
    """Check that a model is after the block as before it."""
    with torch.no_grad():
        model(torch.tensor([[3]]), attention_mask=torch.ones(1, 1))  # what libraries leave behind
    before = traces(model)
    yield
    check_untouched(model, before)


def traces(model):
    """All that training could leave on a model, in a form that can be compared."""
    inner = model.original_model
    named = [*inner.named_parameters(), *inner.named_buffers()]
    return {
        "values": {name: x.detach().clone() for name, x in named},
        "gradients": {name: x.grad for name, x in inner.named_parameters()},
        "flags": {name: x.requires_grad for name, x in inner.named_parameters()},
        "modes": [module.training for module in model.modules()],
        "hooks": [len(point.fwd_hooks) for point in set(model.hook_dict.values())],
        "torch hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for m in model.modules()
        ],
        "attributes": sorted(vars(model)),
    }


def check_untouched(model, before):
    after = traces(model)
    for name, value in before.pop("values").items():
        assert torch.equal(after["values"][name], value), name
    for name, gradient in before.pop("gradients").items():
        assert after["gradients"][name] is gradient, name
    for name, value in before.items():
        assert after[name] == value, name
