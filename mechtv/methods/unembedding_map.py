"""The linear map between two models' residual streams that their unembeddings imply.

The two unembeddings say which states mean the same (docs/methods.md, "linear, across models"):
M = argmin ||W_U,small M - W_U,large|| over the tokens that both vocabularies share, so
h_small = M h_large nearly. `carry_vector` takes vectors through it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.methods.vocabularies import shared_tokens
from mechtv.models import ModelCard, describe

LOUD = 1024.0  # so large that the epsilon in a norm does not matter


@dataclass(frozen=True, kw_only=True, eq=False)
class UnembeddingMap:
    """The map M from the states of a large model to those of a small one.

    Args:
        matrix: M, float64, on the CPU.
        n_tokens: how many shared tokens it was fitted on.
        relative_error: ||W_U,small M - W_U,large|| / ||W_U,large|| (Frobenius) over these.
        large, small: the two models.
        fold_norm, ridge: the options of `unembedding_map`.
    """

    matrix: Float[Tensor, "d_small d_large"]
    n_tokens: int
    relative_error: float
    large: ModelCard
    small: ModelCard
    fold_norm: bool
    ridge: float

    @cached_property
    def inverse(self) -> Float[Tensor, "d_large d_small"]:
        """The pseudo-inverse of M."""
        inverse: Tensor = torch.linalg.pinv(self.matrix)
        return inverse

    def table(self) -> pd.DataFrame:
        """One row: the models, their sizes, the shared tokens and the error."""
        row = {
            "large": self.large.name,
            "small": self.small.name,
            "d_large": self.large.d_model,
            "d_small": self.small.d_model,
            "tokens_large": self.large.d_vocab,
            "tokens_small": self.small.d_vocab,
            "tokens_shared": self.n_tokens,
            "relative_error": self.relative_error,
            "fold_norm": self.fold_norm,
            "ridge": self.ridge,
        }
        return pd.DataFrame([row])


def unembedding_map(
    large: TransformerBridge,
    small: TransformerBridge,
    *,
    tokens: Collection[str] | None = None,
    fold_norm: bool = True,
    ridge: float = 0.0,
) -> UnembeddingMap:
    """Fit M by least squares in float64 (docs/methods.md).

    Args:
        tokens: the texts of the tokens to fit on, such as `" cat"`; all shared ones if None.
        fold_norm: take the unembeddings as they act on the stream before the final norm, times its
            gain (and centred, for LayerNorm). M then does not depend on whether a model keeps the
            gain in the norm or in the unembedding; False takes W_U as it is.
        ridge: lambda in ||U_small M - U_large||^2 + lambda ||M||^2.

    Returns:
        The map; it takes vectors of the large model's width.

    Raises:
        InvalidInput: for a negative ridge, tokens that are not shared, or fewer shared tokens than
            the small model's width and no ridge.
    """
    if not 0 <= ridge < float("inf"):
        raise InvalidInput(f"ridge={ridge} must be finite and 0 or more.")
    in_large, in_small = shared_tokens(large, small, tokens)
    n_tokens, width = len(in_large), small.cfg.d_model
    if not n_tokens or (n_tokens < width and not ridge):
        raise InvalidInput(
            f"{n_tokens} shared tokens cannot fix a map to a model of width {width}; use at "
            f"least {width} tokens, or one at least and ridge above 0."
        )
    target = _unembedding(large, in_large, fold_norm)
    given = _unembedding(small, in_small, fold_norm)
    matrix = _least_squares(given, target, ridge)
    return UnembeddingMap(
        matrix=matrix,
        n_tokens=n_tokens,
        relative_error=float((given @ matrix - target).norm() / target.norm()),
        large=describe(large),
        small=describe(small),
        fold_norm=fold_norm,
        ridge=float(ridge),
    )


def _unembedding(
    model: TransformerBridge, ids: Sequence[int], fold_norm: bool
) -> Float[Tensor, "token d_model"]:
    """The unembedding's rows for some tokens, float64."""
    with torch.no_grad():
        weight: Tensor = model.W_U
        rows: Tensor = weight[:, torch.tensor(ids, device=weight.device)].T.cpu().double()
        if not fold_norm:
            return rows
        rows = rows * _gain(model)
    centred = "LN" in str(model.cfg.normalization_type)
    return rows - rows.mean(dim=1, keepdim=True) if centred else rows


def _gain(model: TransformerBridge) -> Float[Tensor, " d_model"]:
    """The final norm's gain, found by asking the norm: some add 1 to what they store."""
    weight: Tensor = model.W_U
    probe = torch.ones(model.cfg.d_model, dtype=weight.dtype, device=weight.device)
    probe[1::2] = -1
    probe = LOUD * (probe - probe.mean())  # centred, for LayerNorm, and nowhere 0
    out = model.ln_final(torch.stack([probe, -probe])[None])[0].cpu().double()
    wide = probe.cpu().double()
    gain: Tensor = (out[0] - out[1]) / 2 / (wide / wide.square().mean().sqrt())  # without the bias
    return gain


def _least_squares(
    given: Float[Tensor, "token d_small"], target: Float[Tensor, "token d_large"], ridge: float
) -> Float[Tensor, "d_small d_large"]:
    """The matrix of least norm among the best ones."""
    if ridge:
        identity = ridge**0.5 * torch.eye(given.shape[1], dtype=given.dtype)
        given = torch.cat([given, identity])
        target = torch.cat([target, target.new_zeros(len(identity), target.shape[1])])
    solution: Tensor = torch.linalg.lstsq(given, target).solution
    return solution
