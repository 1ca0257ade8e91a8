"""Ridge regression with many outputs, its ridge chosen by generalised cross-validation, and scores.

One singular value decomposition of the inputs gives every ridge's fit and score in closed form,
whether there are more inputs than dimensions or fewer.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cosine_similarity

from mechtv.errors import InvalidInput
from mechtv.evaluation.intervals import Estimate, mean, ratio

LEAST, MOST, STEPS = -16.0, 1.0, 69  # powers of ten, and how many from one to the other


@dataclass(frozen=True, kw_only=True, eq=False)
class Ridge:
    """y ≈ W x + b (b is None without an intercept), in float64 on the CPU.

    Args:
        ridge: λ, in squared units of x.
        rank: how many directions the inputs span; W is 0 outside of them.
        basis: orthonormal, of those directions.
    """

    matrix: Float[Tensor, "d_out d_in"]
    bias: Float[Tensor, " d_out"] | None
    ridge: float
    rank: int
    basis: Float[Tensor, "rank d_in"]

    def predict(self, x: Float[Tensor, "*sample d_in"]) -> Float[Tensor, "*sample d_out"]:
        """W x + b of each row."""
        product = x.to(self.matrix) @ self.matrix.T
        return product if self.bias is None else product + self.bias


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldOut:
    """How well a map predicts samples that it was not fitted to, each sample by itself.

    Args:
        errors: ‖y - ŷ‖², and `totals` ‖y‖².
        cosines: of y and ŷ.
        centred_errors, centred_totals, centred_cosines: the same with y and ŷ each less its mean
            over the samples. They say whether the variation is predicted, whatever the level.
    """

    errors: Float[np.ndarray, " sample"]
    totals: Float[np.ndarray, " sample"]
    cosines: Float[np.ndarray, " sample"]
    centred_errors: Float[np.ndarray, " sample"]
    centred_totals: Float[np.ndarray, " sample"]
    centred_cosines: Float[np.ndarray, " sample"]

    @classmethod
    def of(
        cls, y: Float[Tensor, "sample d_out"], predicted: Float[Tensor, "sample d_out"]
    ) -> "HeldOut":
        """Scores of predictions."""
        found = {}
        for prefix, of_y, of_p in (
            ("", 0.0, 0.0),
            ("centred_", y.mean(dim=0), predicted.mean(dim=0)),
        ):
            true, given = y - of_y, predicted - of_p
            found[f"{prefix}errors"] = (true - given).square().sum(dim=1).cpu().numpy()
            found[f"{prefix}totals"] = true.square().sum(dim=1).cpu().numpy()
            found[f"{prefix}cosines"] = cosine_similarity(true, given, dim=1).cpu().numpy()
        return cls(**found)

    def r2(self, *, centred: bool = False) -> Estimate:
        """1 - Σ errors / Σ totals, with the percentile bootstrap interval over samples.

        Not a number where there is nothing to be explained.
        """
        errors = self.centred_errors if centred else self.errors
        totals = self.centred_totals if centred else self.totals
        left = ratio(errors, totals)
        return Estimate(value=1 - left.value, low=1 - left.high, high=1 - left.low, n=left.n)

    def cosine(self, *, centred: bool = False) -> Estimate:
        """The mean cosine over samples, with its interval."""
        return mean(self.centred_cosines if centred else self.cosines)

    def estimates(self) -> dict[str, Estimate]:
        """Each score by name."""
        return {
            "R²": self.r2(),
            "R², centred": self.r2(centred=True),
            "cosine": self.cosine(),
            "cosine, centred": self.cosine(centred=True),
        }


def fit_ridge(
    x: Float[Tensor, "sample d_in"],
    y: Float[Tensor, "sample d_out"],
    *,
    ridge: float | None = None,
    intercept: bool = False,
) -> Ridge:
    """The W (and b) of least Σ ‖y - W x - b‖² + ridge ‖W‖².

    Args:
        ridge: chosen by generalised cross-validation if None; 0 gives the W of least norm among
            those of least error.
        intercept: fit an unpenalised b.

    Raises:
        InvalidInput: if `ridge` is negative.
    """
    if ridge is not None and not 0 <= ridge < float("inf"):
        raise InvalidInput(f"ridge={ridge} is none; use 0 or more, or None to have it chosen.")
    x, y = x.cpu().double(), y.cpu().double()
    mean_x, mean_y = x.mean(dim=0), y.mean(dim=0)
    if intercept:
        x, y = x - mean_x, y - mean_y
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    rank = int((s > s.max() * max(x.shape) * torch.finfo(s.dtype).eps).sum())
    u, s, vt = u[:, :rank], s[:rank], vt[:rank]
    inner = u.T @ y
    if ridge is None:
        outside = float((y - u @ inner).square().sum())
        ridge = _best(s, inner, outside, n=len(x), free=int(intercept))
    matrix = ((s / (s.square() + ridge))[:, None] * inner).T @ vt
    bias = mean_y - matrix @ mean_x if intercept else None
    return Ridge(matrix=matrix, bias=bias, ridge=ridge, rank=rank, basis=vt)


def generalised_scores(
    ridges: Float[Tensor, " ridge"],
    s: Float[Tensor, " rank"],
    inner: Float[Tensor, "rank d_out"],
    outside: float,
    *,
    n: int,
    free: int = 0,
) -> Float[Tensor, " ridge"]:
    """Each ridge's generalised cross-validation score, (‖y - ŷ‖² / n) / (1 - tr H / n)².

    Golub, Heath and Wahba 1979, *Generalized Cross-Validation as a Method for Choosing a Good Ridge
    Parameter*, equation 1.4, with the squared error summed over outputs.

    Args:
        s: the singular values of the inputs; `inner` the outputs along their left singular vectors.
        outside: the squares of what no map of these inputs can reach.
        n: how many samples; `free` unpenalised parameters of each output, such as an intercept.
    """
    lost = ridges[:, None] / (s.square() + ridges[:, None])
    error = outside + lost.square() @ inner.square().sum(dim=1)
    left = n - len(s) - free + lost.sum(dim=1)  # n - tr H, exact where nearly all is fitted
    scores: Tensor = n * error / left.square()
    return scores


def _best(
    s: Float[Tensor, " rank"],
    inner: Float[Tensor, "rank d_out"],
    outside: float,
    *,
    n: int,
    free: int,
) -> float:
    if not len(s):
        return 0.0
    if len(s) + free >= n:
        outside = 0.0  # all can be reached; what is left is rounding
    ridges = s.max().square() * torch.logspace(LEAST, MOST, STEPS, dtype=s.dtype)
    scores = generalised_scores(ridges, s, inner, outside, n=n, free=free)
    return float(ridges[scores.argmin()])
