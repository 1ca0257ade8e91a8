"""The adapters of the efficiency table, made with `peft`: one virtual token, or one rank.

Each sits on a plain Hugging Face model of its own, ready to be trained. Everything is made under a
seed, and in a size that can be compared with a task vector's.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from mechtv.errors import InvalidInput
from mechtv.methods.plain_model import Network, plain_model
from mechtv.seeds import torch_rng

Kind = Literal["prompt", "prefix", "lora"]

N_EMBEDDINGS = 4096  # enough to know how large they are


@dataclass(frozen=True, kw_only=True, eq=False)
class Adapter:
    """A plain model under an adapter that has not been trained yet.

    Args:
        unit: the size of what is trained, in which its step is given; 1 for LoRA.
        projection: the name of the one that LoRA adds to.
    """

    network: Network
    unit: float = 1.0
    projection: str | None = None


def prompt_adapter(model: TransformerBridge, *, seed: int, purpose: str) -> Adapter:
    """One trained embedding before the prompt (Lester et al., arXiv 2104.08691).

    It starts from the embedding of a token drawn from the vocabulary. Its unit is the root mean
    square of the embeddings.
    """
    peft, base = _peft(), plain_model(model)
    with _drawn_from(seed, purpose):
        config = peft.PromptTuningConfig(
            task_type=peft.TaskType.CAUSAL_LM,
            num_virtual_tokens=1,
            prompt_tuning_init="SAMPLE_VOCAB",
        )
        network = Network(module=_wrapped(base, config), n_virtual=1)
    some = torch.arange(min(_n_embeddings(base), N_EMBEDDINGS), device=base.device)
    with torch.no_grad():
        return Adapter(network=network, unit=_size(base.get_input_embeddings()(some)))


def prefix_adapter(model: TransformerBridge, *, seed: int, purpose: str) -> Adapter:
    """One trained key and value before the prompt at every layer (Li and Liang, arXiv 2101.00190).

    They start from the model's own keys and values of a token drawn from the vocabulary, as the
    first of a text (there, section 7.4, activations of real words): the model is then the plain one
    with that token before each prompt. `peft` itself draws them from N(0, 1), which is far from
    what models hold: the default model's loss on present-past then ends at 12.2, above the 11.8 of
    no prefix, against 2.9 from here (64 pairs, 4 epochs, steps of 0.2; 0.6 with steps of 0.03
    units). The unit is the root mean square of these keys and values.
    """
    peft, base = _peft(), plain_model(model)
    token = torch.randint(_n_embeddings(base), (1, 1), generator=torch_rng(seed, purpose))
    start = _keys_and_values(base, token)
    config = peft.PrefixTuningConfig(task_type=peft.TaskType.CAUSAL_LM, num_virtual_tokens=1)
    with _drawn_from(seed, purpose):
        network = Network(module=_wrapped(base, config))
    (weight,) = network.trained
    with torch.no_grad():
        weight.copy_(start)
    return Adapter(network=network, unit=_size(start))


def lora_adapter(
    model: TransformerBridge, *, layer: int | None, target: str | None, seed: int, purpose: str
) -> Adapter:
    """A rank-1 matrix that is added to one projection (Hu et al., arXiv 2106.09685).

    It starts from zero: `peft` draws one factor and lets the other be 0.

    Args:
        layer: the block; the middle one if None.
        target: the end of the projection's name in that block; the attention's output projection if
            None.

    Raises:
        InvalidInput: if there is no such block, or no single projection of that name in it.
    """
    peft, base = _peft(), plain_model(model)
    name = _projection(model, base, layer, target)
    with _drawn_from(seed, purpose):
        config = peft.LoraConfig(
            task_type=peft.TaskType.CAUSAL_LM,
            r=1,
            lora_alpha=1,
            target_modules=re.escape(name),
            fan_in_fan_out=isinstance(base.get_submodule(name), Conv1D),  # input x output
        )
        network = Network(module=_wrapped(base, config))
    return Adapter(network=network, projection=name)


def _peft() -> Any:
    try:
        import peft  # an extra, and slow to import
    except ImportError as error:
        raise InvalidInput(
            "Baselines need the peft library; install it with: pip install 'mechtv[peft]'"
        ) from error
    return peft


def _wrapped(base: PreTrainedModel, config: Any) -> nn.Module:
    """The model under a fresh adapter, in evaluation mode."""
    with warnings.catch_warnings():
        # peft asks transformers for a name that is going away
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        module: nn.Module = _peft().get_peft_model(base, config)
    return module.eval()


@contextmanager
def _drawn_from(seed: int, purpose: str) -> Iterator[None]:
    """Inside, torch's global generators are seeded; afterwards they are as they were."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(torch_rng(seed, purpose).initial_seed())
        yield


def _n_embeddings(base: PreTrainedModel) -> int:
    weight: Any = base.get_input_embeddings().weight
    return len(weight)


def _size(x: Float[Tensor, "*any"]) -> float:
    """The root mean square."""
    return float(x.double().square().mean().sqrt())


def _keys_and_values(base: PreTrainedModel, token: Int[Tensor, "1 1"]) -> Float[Tensor, "1 number"]:
    """The keys and values of a text of one token at every layer, in the order of peft's prefix."""
    with torch.no_grad():
        cache = base(input_ids=token.to(base.device), use_cache=True).past_key_values
    return torch.cat(
        [
            rearrange(x, "1 kv_head 1 d_head -> 1 (kv_head d_head)")
            for layer in cache.layers
            for x in (layer.keys, layer.values)
        ],
        dim=1,
    )


def _projection(
    model: TransformerBridge, base: nn.Module, layer: int | None, target: str | None
) -> str:
    """The full name of one projection of one block."""
    layer = model.cfg.n_layers // 2 if layer is None else layer
    if not 0 <= layer < model.cfg.n_layers:
        raise InvalidInput(
            f"layer={layer} does not exist: this model has layers 0 to {model.cfg.n_layers - 1}."
        )
    attention = model.blocks[layer].attn
    wanted = f"{attention.name}.{attention.o.name}" if target is None else target
    ends = _projections(base, layer)
    found = [name for name, end in ends.items() if f".{end}".endswith(f".{wanted}")]
    if len(found) != 1:
        raise InvalidInput(
            f"target={wanted!r} names {len(found)} projections of block {layer}; give the end of "
            f"one of: {', '.join(sorted(ends.values()))}."
        )
    return found[0]


def _projections(base: nn.Module, layer: int) -> dict[str, str]:
    """The projections of a block by their full names, with their names in the block."""
    found = {}
    for name, module in base.named_modules():
        parts = re.split(r"\.(\d+)\.", name, maxsplit=1)  # the first number is the block's
        if parts[1:2] == [str(layer)] and isinstance(module, (nn.Linear, Conv1D)):
            found[name] = parts[2]
    return found
