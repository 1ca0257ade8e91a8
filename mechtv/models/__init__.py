"""Open a language model as a `TransformerBridge`, and say which one it is.

Use `open_model` for anything that mechtv shall work on: it sets the beginning-of-sequence rule, the
padding token and the evaluation mode that the rest of the package counts on. Do not use it for a
bridge that you have built yourself: every function of mechtv takes that bridge as it is.
"""

from mechtv.models.bundled import list_models
from mechtv.models.card import ModelCard, describe
from mechtv.models.open import DTYPES, open_model

__all__ = ["DTYPES", "ModelCard", "describe", "list_models", "open_model"]
