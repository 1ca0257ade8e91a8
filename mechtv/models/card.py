"""What a model is: the few facts that every result records next to its numbers.

Use `describe` to label results. It reads the model and never changes it; it does not say how well
the model does anything.
"""

from dataclasses import dataclass
from typing import Literal
from weakref import WeakKeyDictionary

from transformer_lens.model_bridge import TransformerBridge

UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """Which model, which weights, which shape.

    Attributes:
        name: What `open_model` was asked for.
        revision: The hub's commit, or the sha256 of the GGUF file, or "unknown".
        n_layers, n_heads, d_model, d_vocab: Blocks, query heads, residual width, vocabulary.
        dtype: The weights' number format, such as "float32".
        weights: "raw" (Hugging Face's own) or "processed" (norms folded and weights centred by
            `enable_compatibility_mode`). Per-head numbers of the two cannot be compared.
    """

    name: str
    revision: str
    n_layers: int
    n_heads: int
    d_model: int
    d_vocab: int
    dtype: str
    weights: Literal["raw", "processed"]


_origins: WeakKeyDictionary[TransformerBridge, tuple[str, str]] = WeakKeyDictionary()


def remember(model: TransformerBridge, name: str, revision: str) -> None:
    """Note where a model came from, for as long as the model lives."""
    _origins[model] = (name, revision)


def describe(model: TransformerBridge) -> ModelCard:
    """Return the card of any bridge, opened by mechtv or not.

    Args:
        model: The bridge. One that `open_model` did not make has the name in its configuration and
            the revision "unknown".
    """
    name, revision = _origins.get(model) or (str(model.cfg.model_name), UNKNOWN)
    return ModelCard(
        name=name,
        revision=revision,
        n_layers=model.cfg.n_layers,
        n_heads=model.cfg.n_heads,
        d_model=model.cfg.d_model,
        d_vocab=model.cfg.d_vocab,
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        weights="processed" if _processed(model) else "raw",
    )


def _processed(model: TransformerBridge) -> bool:
    """Whether weights were changed; compatibility mode alone (`no_processing=True`) leaves them."""
    return bool(getattr(model, "_weights_processed", model.compatibility_mode))
