"""Tiny random models for the tests: every kind of attention, norm and position that can go wrong.

`tiny(family)` gives a bridge of three blocks, `tiny_hf(family)` the same Hugging Face model without
a bridge, `tiny_tokenizer()` their tokenizer. Weights are large (std 0.3), so that every effect is
far above rounding, and seeded, without touching torch's global generator. They know no language;
for tests that need in-context learning take the bundled model, marked `model`.

The families, and what is special about each:

    llama    grouped-query attention (4 heads over 2), RMSNorm, head width 16 where 32 / 4 is 8
    gpt2     LayerNorm, biases, learned positions, one matrix for q, k and v
    qwen3    grouped-query attention, norms on q and k, head width 16
    qwen2    grouped-query attention, biases on q, k and v only
    mistral  grouped-query attention, sliding window of 6 tokens, head width 16
    gemma2   norms before and after each sublayer, soft caps, a sliding window in blocks 0 and 2
    gemma3   the same norms without soft caps, norms on q and k, two rotary bases
    neox     attention and MLP in parallel, rotary positions
    phi      attention and MLP in parallel behind one norm, biases, also on the unembedding
    bloom    ALiBi, LayerNorm after the embedding
    opt      learned positions with an offset, taken from the attention mask
    native   TransformerLens's own model (LayerNorm, learned positions)

and, for single tests only (`RARE_FAMILIES`):

    cohere   a factor on the logits, attention and MLP in parallel
    granite  factors on the logits and on what attention and MLP add to the stream
    olmo     LayerNorm without gain or bias
    olmo2    norms after attention and MLP, none before

The bridge opens them all. In float64 they compute in float64 throughout (`models.double`), so that
tests can ask 1e-10.
"""

import functools
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources.native import boot as boot_native
from transformers import (
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from mechtv.models import open_model
from mechtv.models.double import compute_in_double
from mechtv.models.tokenizer import kept_as_is

N_LAYERS, D_MODEL, N_HEADS, D_MLP, N_CTX = 3, 32, 4, 64, 128
VOCABULARY = 384  # 256 bytes, 3 special tokens, the rest learned: most words take several tokens

SENTENCES = (
    "jump -> jumped, walk -> walked, play -> played, look -> looked, talk -> talked",
    "France -> Paris, Italy -> Rome, Spain -> Madrid, Germany -> Berlin, Japan -> Tokyo",
    "hot -> cold, big -> small, up -> down, good -> bad, fast -> slow, old -> new",
    "cat -> cats, dog -> dogs, house -> houses, tree -> trees, word -> words",
    "Q: what is the capital of the country?\nA: it is the city with the palace\n\n",
    "the past of the word is the word with an ending, and the answer is a word\n",
)


@functools.cache
def tiny_tokenizer(bos: bool = False) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer that was saved and reopened, as every real one is.

    Args:
        bos: Whether it puts `<s>` before every text. It knows the token either way.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    trained.train_from_iterator(SENTENCES, trainer)
    if bos:
        trained.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
        )
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    folder = tempfile.mkdtemp(prefix="mechtv-tiny-tokenizer-")
    PreTrainedTokenizerFast(tokenizer_object=trained, **names).save_pretrained(folder)
    reopened: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return reopened


def tiny(
    family: str,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    bos: bool = False,
    **overrides: Any,
) -> TransformerBridge:
    """A tiny random bridge with its tokenizer, the same for the same arguments.

    Args:
        family: One of `FAMILIES` or `RARE_FAMILIES`.
        dtype: The weights' number format; the float32 weights are the float64 ones, rounded.
        seed: Which random weights.
        bos: Whether the tokenizer begins every text with a BOS token.
        overrides: Settings of the family's configuration, such as `num_hidden_layers=2`.
    """
    if family == "native":
        return _tiny_native(dtype, seed, bos, overrides)
    model = tiny_hf(family, dtype, seed, **overrides)
    with torch.random.fork_rng(devices=[]):
        return open_model(model, tokenizer=tiny_tokenizer(bos), device="cpu", dtype=dtype)


def tiny_hf(
    family: str, dtype: torch.dtype = torch.float64, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """The Hugging Face model that `tiny` wraps, by itself, in evaluation mode."""
    config_class, model_class, settings = (_HUGGING_FACE | _RARE)[family]
    eager = {"attn_implementation": "eager"}  # as in the bridge
    config = config_class(**{**_TOKENS, **eager, **settings, **overrides})
    with torch.random.fork_rng(devices=[]):
        model = model_class(config)
    torch.nn.Module.to(model, dtype)
    model.eval()
    _fill(model, seed, gain=0.0 if family.startswith("gemma") else 1.0)
    if dtype == torch.float64:
        compute_in_double(model)  # as the bridge around it is
    return model


def _tiny_native(
    dtype: torch.dtype, seed: int, bos: bool, overrides: dict[str, Any]
) -> TransformerBridge:
    shape = {"d_model": D_MODEL, "d_head": 8, "n_heads": N_HEADS, "n_layers": N_LAYERS}
    sizes = {**shape, "d_mlp": D_MLP, "n_ctx": N_CTX, "d_vocab": VOCABULARY, "device": "cpu"}
    rules = {"act_fn": "gelu", "normalization_type": "LN", "seed": seed}
    tokenizer = tiny_tokenizer(bos)
    with kept_as_is(tokenizer):
        config = TransformerBridgeConfig(**{**sizes, **rules, **overrides})
        model: TransformerBridge = boot_native(config, tokenizer=tokenizer, dtype=dtype)
    model.cfg.default_prepend_bos = bos
    _fill(model, seed, gain=1.0)
    model.eval()
    return model


def _fill(model: torch.nn.Module, seed: int, gain: float) -> None:
    """Draw all weights anew: matrices with std 0.3, norm gains near `gain`, biases near 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        is_gain = weight.ndim == 1 and name.endswith("weight")
        centre = gain if is_gain else 0.0
        std = 0.3 if weight.ndim > 1 else 0.1
        weight.data.copy_(centre + std * noise)


_TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_BLOCKS = {"hidden_size": D_MODEL, "num_hidden_layers": N_LAYERS, "num_attention_heads": N_HEADS}
_DENSE = {**_BLOCKS, "intermediate_size": D_MLP, "max_position_embeddings": N_CTX}
_GROUPED = {**_DENSE, "num_key_value_heads": 2, "tie_word_embeddings": False}
_WIDE = {**_GROUPED, "head_dim": 16}
_WINDOW = {"sliding_window": 6}
_LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_GEMMA = {**_WIDE, **_WINDOW, "query_pre_attn_scalar": 16, "layer_types": _LAYER_TYPES}
_CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}
_GPT2 = {"n_embd": D_MODEL, "n_layer": N_LAYERS, "n_head": N_HEADS, "n_positions": N_CTX}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_OPT = {**_BLOCKS, "ffn_dim": D_MLP, "max_position_embeddings": N_CTX}
_BLOOM = {"hidden_size": D_MODEL, "n_layer": N_LAYERS, "n_head": N_HEADS}

_Build = tuple[Callable[..., PreTrainedConfig], Callable[..., PreTrainedModel], dict[str, Any]]


def _family(name: str, model: str, settings: dict[str, Any]) -> _Build:
    return getattr(transformers, f"{name}Config"), getattr(transformers, model), settings


_HUGGING_FACE: dict[str, _Build] = {
    "llama": _family("Llama", "LlamaForCausalLM", _WIDE),
    "gpt2": _family("GPT2", "GPT2LMHeadModel", {**_GPT2, **_NO_DROPOUT}),
    "qwen3": _family("Qwen3", "Qwen3ForCausalLM", _WIDE),
    "qwen2": _family("Qwen2", "Qwen2ForCausalLM", _GROUPED),
    "mistral": _family("Mistral", "MistralForCausalLM", {**_WIDE, **_WINDOW}),
    "gemma2": _family("Gemma2", "Gemma2ForCausalLM", {**_GEMMA, **_CAPS}),
    "gemma3": _family("Gemma3Text", "Gemma3ForCausalLM", _GEMMA),
    "neox": _family("GPTNeoX", "GPTNeoXForCausalLM", _DENSE),
    "phi": _family("Phi", "PhiForCausalLM", {**_DENSE, "resid_pdrop": 0.0}),
    "bloom": _family("Bloom", "BloomForCausalLM", _BLOOM),
    "opt": _family("OPT", "OPTForCausalLM", {**_OPT, "word_embed_proj_dim": D_MODEL}),
}

_GRANITE = {"logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.25}
_RARE: dict[str, _Build] = {
    "cohere": _family("Cohere", "CohereForCausalLM", {**_GROUPED, "logit_scale": 0.25}),
    "granite": _family("Granite", "GraniteForCausalLM", {**_GROUPED, **_GRANITE}),
    "olmo": _family("Olmo", "OlmoForCausalLM", _GROUPED),
    "olmo2": _family("Olmo2", "Olmo2ForCausalLM", _GROUPED),
}

FAMILIES = (*_HUGGING_FACE, "native")
RARE_FAMILIES = tuple(_RARE)
