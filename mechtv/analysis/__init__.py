"""Why a vector works."""

from mechtv.analysis.lens import top_tokens

__all__ = ["top_tokens"]
