"""The Hugging Face model inside a bridge, without the bridge, for libraries that need one.

It shares the bridge's weights and can be thrown away or wrapped at will: the bridge does not see
it. For anything that mechtv itself computes use the bridge and `mechtv.forward`.
"""

import copy
import inspect
import re
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge
from transformers import PreTrainedModel

from mechtv.errors import InvalidInput
from mechtv.evaluation.accuracy import Forced, answer_places
from mechtv.forward.memory import full_passes
from mechtv.forward.run import last_logits, log_probabilities
from mechtv.tasks.prompts import Prompts

N_CHECKED = 8  # prompts on which it has to give the bridge's logits


def plain_model(model: TransformerBridge) -> PreTrainedModel:
    """The Hugging Face model inside a bridge, without the bridge. It shares the weights' memory.

    Raises:
        InvalidInput: if there is none, or a weight of it cannot be found.
    """
    inner = model.original_model
    if not isinstance(inner, PreTrainedModel):
        raise InvalidInput(
            f"This model wraps a {type(inner).__name__}, but peft works on models of Hugging Face; "
            "open one with open_model(...)."
        )
    with torch.device("meta"):  # no memory, no random weights
        plain = type(inner)(copy.deepcopy(inner.config))
    named = (inner.named_parameters, inner.named_buffers)
    found = {_plain_name(name): x for of in named for name, x in of(remove_duplicate=False)}
    for path, module in plain.named_modules():
        for own in (module._parameters, module._buffers):
            for name in [name for name, tensor in own.items() if tensor is not None]:
                key = f"{path}.{name}".lstrip(".")
                if key not in found:
                    raise InvalidInput(
                        f"The bridge has no {key!r} of {type(inner).__name__}, so the plain model "
                        "cannot be built; baselines do not work with this model."
                    )
                own[name] = _shared(found[key], is_weight=own is module._parameters)
    plain.eval()
    return plain


def _plain_name(name: str) -> str:
    """The name of a weight without the bridge's wrappers around modules."""
    return re.sub(r"\b_?original_component\.", "", name)


def _shared(tensor: Tensor, *, is_weight: bool) -> Any:
    """Another tensor over the same memory, outside of any graph."""
    return nn.Parameter(tensor.detach(), requires_grad=False) if is_weight else tensor.detach()


@dataclass(frozen=True, kw_only=True, eq=False)
class Network:
    """A Hugging Face model, perhaps under an adapter, that reads mechtv's prompts.

    Args:
        module: the model, or what an adapter library made of it.
        n_virtual: how many columns of logits stand before those of the prompt.
    """

    module: nn.Module
    n_virtual: int = 0

    @property
    def base(self) -> Any:
        """The Hugging Face model itself."""
        return getattr(self.module, "get_base_model", lambda: self.module)()

    @property
    def trained(self) -> list[nn.Parameter]:
        """The adapter's weights."""
        return [weight for weight in self.module.parameters() if weight.requires_grad]

    def next_token(self, prompts: Prompts) -> Float[Tensor, "place d_vocab"]:
        """The logits at each row's last prompt token."""
        return self._logits(prompts, torch.arange(len(prompts)), prompts.last)

    def forced(self, prompts: Prompts) -> Forced:
        """What it predicts at every answer token under teacher forcing, as `accuracy.force`."""
        forced = prompts.with_answers()
        row, column = answer_places(forced)
        there = log_probabilities(self._logits(forced, row, column))
        ids = torch.tensor([token for answer in forced.answers for token in answer])
        return Forced(
            row=row.to(there.device),
            ids=ids.to(there.device),
            first=torch.searchsorted(row, torch.arange(len(forced))).to(there.device),
            log_probabilities=there,
        )

    def _logits(
        self, prompts: Prompts, row: Int[Tensor, " place"], column: Int[Tensor, " place"]
    ) -> Float[Tensor, "place d_vocab"]:
        tokens, mask, start = _padded_right(prompts)
        places = column - start[row] + self.n_virtual
        kept = places.unique()
        device = next(self.module.parameters()).device
        options: dict[str, Any] = {"use_cache": False}
        cuts = "logits_to_keep" in inspect.signature(self.base.forward).parameters
        if cuts:
            options["logits_to_keep"] = kept.to(device)
        logits: Tensor = self.module(
            input_ids=tokens.to(device), attention_mask=mask.long().to(device), **options
        ).logits
        found = torch.searchsorted(kept, places) if cuts else places
        return logits[row.to(device), found.to(device)]


def _padded_right(
    prompts: Prompts,
) -> tuple[Int[Tensor, "batch pos"], Bool[Tensor, "batch pos"], Int[Tensor, " batch"]]:
    """Tokens and mask with each row's first token in column 0, and where that was before.

    A virtual token then stands just before each prompt, however long the others are.
    """
    start = prompts.mask.long().argmax(dim=1)
    width = prompts.tokens.shape[1]
    source = (torch.arange(width) + start[:, None]) % width
    return prompts.tokens.gather(1, source), prompts.mask.gather(1, source), start


def check_same(model: TransformerBridge, plain: Network, prompts: Prompts) -> None:
    """Check that a plain model gives the bridge's logits.

    Raises:
        InvalidInput: if they differ by more than rounding, on one of the first eight prompts.
    """
    some = prompts.select(range(min(len(prompts), N_CHECKED)))
    with torch.no_grad(), full_passes():
        wanted, found = last_logits(model, some), plain.next_token(some)
    size = float(wanted.abs().max())
    error = float((wanted - found).abs().max()) / size
    if not error <= max(1e-5, 4 * torch.finfo(wanted.dtype).eps):
        raise InvalidInput(
            f"The logits of the bridge and of the plain Hugging Face model differ by {error:.1e} "
            "of their size, so baselines would not be of this model; open it in raw weights."
        )
