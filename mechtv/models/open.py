"""Open a model by name, folder, file or object, ready for mechtv.

`open_model` is the one way in. What it returns is TransformerLens's own bridge in raw weights: its
logits equal Hugging Face's exactly (in float64 they are nearer the truth). It does not train,
quantise or change weights.
"""

import os
from typing import Any

import torch
from transformer_lens.model_bridge import TransformerBridge
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mechtv.errors import InvalidInput
from mechtv.models.card import UNKNOWN, remember
from mechtv.models.double import compute_in_double
from mechtv.models.gguf import no_loading_bars
from mechtv.models.place import find, readable
from mechtv.models.tokenizer import (
    Tokenizer,
    given_tokenizer,
    kept_as_is,
    load_tokenizer,
    tokenizer_of_loaded,
)

DeviceMap = str | dict[str, str | int]

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
"""The number formats of weights, by name."""


def open_model(
    name: str | os.PathLike[str] | PreTrainedModel = "smollm2-135m",
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    device_map: DeviceMap | None = None,
    revision: str | None = None,
    tokenizer: Tokenizer | None = None,
    trust_remote_code: bool = False,
    prepend_bos: bool | None = None,
    gguf_file: str | None = None,
) -> TransformerBridge:
    """Open a model as a `TransformerBridge` with its tokenizer, in evaluation mode.

    Args:
        name: A bundled short name (see `list_models`), a hub id "org/name", a local folder with a
            config.json, a GGUF file, or a loaded Hugging Face model, which the bridge then wraps.
        device: Where the weights go; None lets TransformerLens choose (a loaded model stays).
        dtype: The weights' number format (a loaded model keeps its own). With float64 everything is
            computed in it, where Hugging Face and TransformerLens go through float32 in places.
        device_map: Placement over several devices, as in `transformers`; instead of `device`.
        revision: Branch, tag or commit of a hub model.
        tokenizer: A tokenizer, or the folder or hub id of one, instead of the model's own.
        trust_remote_code: Run the Python code that a hub model brings along.
        prepend_bos: Whether `model.to_tokens` begins with a beginning-of-sequence token; None does
            what the tokenizer does when it is called plainly.
        gguf_file: The GGUF file inside the folder or hub model that `name` says.

    Raises:
        UnknownName: A short name that is not bundled.
        InvalidInput: The model or its tokenizer cannot be found or read, or the arguments exclude
            one another.
    """
    if device is not None and device_map is not None:
        raise InvalidInput(f"Give device={device!r} or device_map={device_map!r}, not both.")
    words = None if tokenizer is None else given_tokenizer(tokenizer, trust_remote_code)
    if isinstance(name, PreTrainedModel):
        _check_loaded(name, dtype, device_map=device_map, revision=revision, gguf_file=gguf_file)
        model = _wrap(name, words or tokenizer_of_loaded(name), device)
        remember(model, _loaded_name(name), getattr(name.config, "_commit_hash", None) or UNKNOWN)
    else:
        place = find(os.fspath(name), revision, gguf_file)
        options = {"revision": place.hub_revision, "trust_remote_code": trust_remote_code}
        words = words or load_tokenizer(place.path, **options)
        placement = {"device": device, "dtype": dtype, "device_map": device_map}
        model = _boot(place.path, words, **placement, **options)
        remember(model, os.fspath(name), place.revision)
    model.cfg.default_prepend_bos = (
        model.cfg.tokenizer_prepends_bos if prepend_bos is None else prepend_bos
    )
    return model


def _boot(path: str, tokenizer: PreTrainedTokenizerBase, **options: Any) -> TransformerBridge:
    with no_loading_bars(), kept_as_is(tokenizer), readable(path):
        model = TransformerBridge.boot_transformers(path, tokenizer=tokenizer, **options)
    if model.cfg.dtype == torch.float64:
        compute_in_double(model)
    model.eval()
    return model


def _wrap(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, device: str | torch.device | None
) -> TransformerBridge:
    """Build the bridge around a loaded model, which becomes part of it."""
    if device is not None:
        torch.nn.Module.to(model, device)
    if not model.config.architectures:  # of a model made from a configuration
        model.config.architectures = [type(model).__name__]
    options = {"device": model.device, "dtype": model.dtype, "hf_model": model}
    return _boot(_loaded_name(model), tokenizer, **options)


def _check_loaded(model: PreTrainedModel, dtype: torch.dtype, **useless: object) -> None:
    given = [option for option, value in useless.items() if value is not None]
    if given:
        raise InvalidInput(
            f"{' and '.join(given)} cannot be used with a model that is already loaded; give it "
            "to the from_pretrained call that loads it."
        )
    if dtype not in (torch.float32, model.dtype):
        raise InvalidInput(
            f"A loaded model keeps its dtype, here {model.dtype}, got dtype={dtype}; convert it "
            "first with model.to(dtype)."
        )


def _loaded_name(model: PreTrainedModel) -> str:
    return str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
