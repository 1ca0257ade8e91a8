"""The linear maps inside a block: heads' values and outputs, and norms whose scale is frozen.

All in the model's raw weights, as the bridge opens them: nothing folded, nothing centred.
"""

from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from einops import einsum, repeat
from jaxtyping import Float
from torch import Tensor
from torch.func import functional_call
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.methods.function_vector import output_weights

Head = tuple[int, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Circuits:
    """One block's value and output maps, one for each query head.

    Args:
        values: W_V; query heads that share a key-value head have the same.
        outputs: W_O, with the factor on what the block adds to the stream (Granite's).
    """

    layer: int
    values: Float[Tensor, "head d_model d_head"]
    outputs: Float[Tensor, "head d_head d_model"]

    @classmethod
    def of(cls, model: TransformerBridge, layer: int) -> "Circuits":
        """Those of a block; query head h reads key-value head h // (heads / key-value heads)."""
        values = model.blocks[layer].attn.W_V.detach()
        outputs = output_weights(model, layer).detach()
        share = outputs.shape[0] // values.shape[0]
        return cls(
            layer=layer,
            values=repeat(values, "kv d w -> (kv share) d w", share=share),
            outputs=outputs,
        )

    def ov(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch head d_model"]:
        """What each head writes if it attends to x alone, without biases: W_O W_V x."""
        x = x.to(self.values)
        inner = einsum(x, self.values, "... d, head d w -> ... head w")
        return einsum(inner, self.outputs, "... head w, head w d -> ... head d")

    def matrices(self) -> Float[Tensor, "head d_model_out d_model_in"]:
        """Each head's OV map as a matrix; it has the rank of d_head."""
        return einsum(self.values, self.outputs, "head i w, head w o -> head o i")


def frozen(
    norm: Any, scale: Float[Tensor, "*#batch 1"], x: Float[Tensor, "*#batch d_model"]
) -> Float[Tensor, "*#batch d_model"]:
    """The norm as a linear map: its centring and its gain, over a scale seen on a run.

    Args:
        norm: one of the bridge's norms, such as `model.blocks[0].ln1`.
        scale: what its `hook_scale` showed; it is broadcast over the states, or they over it.
    """
    if not norm.uses_rms_norm:
        x = x - x.mean(dim=-1, keepdim=True)
    return x / scale * gain(norm)


def gain(norm: Any) -> Float[Tensor, " d_model"]:
    """A norm's gain: 1 where it has none; Gemma's norms store how much it exceeds 1."""
    weight: Tensor | None = getattr(norm.original_component, "weight", None)
    if weight is None:
        return torch.ones(norm.config.d_model, dtype=norm.config.dtype, device=norm.config.device)
    return 1.0 + weight.detach() if norm.uses_weight_offset else weight.detach()


def normed(norm: Any, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
    """The norm itself, past the bridge's hooks, computed in the state's data type."""
    inner = norm.original_component
    weights = {name: weight.to(x.dtype) for name, weight in inner.named_parameters()}
    found: Tensor = functional_call(inner, weights, (x,))
    return found


def pre_norm(model: TransformerBridge, layer: int) -> Any | None:
    """The norm between the residual stream and a block's attention, where the family has one."""
    return getattr(model.blocks[layer], "ln1", None)


def post_norm(model: TransformerBridge, layer: int) -> Any | None:
    """The norm between a block's attention and the residual stream, where the family has one."""
    return getattr(model.blocks[layer], "ln1_post", None)


def is_parallel(model: TransformerBridge) -> bool:
    """Whether attention and MLP read the same residual stream."""
    return bool(getattr(model.cfg, "parallel_attn_mlp", False))


def check_heads(model: TransformerBridge, heads: object) -> tuple[Head, ...]:
    """Heads as pairs (layer, head), distinct and in rising order.

    Raises:
        InvalidInput: for none, a pair that is none, one twice, or a head the model lacks.
    """
    cfg = model.cfg
    given = list(heads) if isinstance(heads, (list, tuple, set)) else []
    pairs = [tuple(pair) if isinstance(pair, (list, tuple)) else () for pair in given]
    if not pairs or any(
        len(pair) != 2 or not all(isinstance(number, Integral) for number in pair) for pair in pairs
    ):
        raise InvalidInput(f"heads={heads!r} are no heads; give pairs (layer, head).")
    for layer, head in pairs:
        if not (0 <= layer < cfg.n_layers and 0 <= head < cfg.n_heads):
            raise InvalidInput(
                f"Head ({layer}, {head}) does not exist: this model has layers 0 to "
                f"{cfg.n_layers - 1} with heads 0 to {cfg.n_heads - 1} each."
            )
    if len(set(pairs)) < len(pairs):
        twice = next(pair for pair in pairs if pairs.count(pair) > 1)
        raise InvalidInput(f"Head {twice} is named twice; give each once.")
    return tuple(sorted((int(layer), int(head)) for layer, head in pairs))


def output_bias(model: TransformerBridge, layer: int) -> Float[Tensor, " d_model"]:
    """b_O; zero where the model has none."""
    projection = model.blocks[layer].attn.o.original_component
    bias = getattr(projection, "bias", None)
    if bias is None:
        return torch.zeros(model.cfg.d_model, dtype=model.cfg.dtype, device=model.cfg.device)
    found: Tensor = bias.detach()
    return found
