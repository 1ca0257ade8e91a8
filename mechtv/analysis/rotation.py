"""How a linear map turns and stretches a vector: its polar decomposition W = Q Σ.

From the singular values W = U S Vᵀ: Q = U Vᵀ turns (or reflects), Σ = V S Vᵀ stretches before it
(*Task Vectors, Learned Not Extracted*, ICLR 2026; docs/analyses.md). Any map has one; what it
says of θ shows beside the same numbers for random vectors. For maps from `fit_propagation`, and for
any other with the attributes of `LinearMap`.

Under LayerNorm, which sees nothing of a vector's mean, W is taken on the centred vectors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from mechtv.analysis.polar import COSINE_Q, Polar
from mechtv.analysis.subject import random_like
from mechtv.errors import InvalidInput
from mechtv.evaluation.provenance import UNKNOWN, Provenance
from mechtv.seeds import torch_rng


@runtime_checkable
class LinearMap(Protocol):
    """W of one vector θ, from the input of block `layer` to the end of the model."""

    @property
    def name(self) -> str:
        """How the map was found."""

    @property
    def task(self) -> str:
        """The task's name."""

    @property
    def layer(self) -> int:
        """The block at whose input θ is added."""

    @property
    def theta(self) -> Float[Tensor, " d_model"]:
        """The vector."""

    @property
    def matrix(self) -> Float[Tensor, "d_model d_model"]:
        """W, which maps column vectors."""

    @property
    def centred(self) -> bool:
        """Whether the model's norms see centred vectors only (LayerNorm)."""

    @property
    def provenance(self) -> Provenance:
        """Model, weights, template and seed."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Turn:
    """How one map turns and stretches its vector.

    Args:
        name: how the map was found.
        theta: as it was given; `seen` is W as the norms see it, `d` of its dimensions (one less
            than the model's under LayerNorm) in `polar`.
        values: each measure of θ by name, `null` those of random vectors.
    """

    name: str
    task: str
    layer: int
    theta: Float[Tensor, " d_model"]
    polar: Polar
    frame: Float[Tensor, "d_model d"]
    values: dict[str, float]
    null: dict[str, Float[np.ndarray, " draw"]]
    provenance: Provenance = UNKNOWN

    @property
    def rotation(self) -> Float[Tensor, "d_model d_model"]:
        """Q on the whole residual stream; it leaves what the norms do not see."""
        unseen = torch.eye(len(self.frame), dtype=self.frame.dtype) - self.frame @ self.frame.T
        return self.frame @ self.polar.rotation @ self.frame.T + unseen

    def null_range(self, measure: str) -> tuple[float, float, float]:
        """The mean of a measure over random vectors, and its central 95 %."""
        drawn = self.null[measure]
        low, high = np.quantile(drawn, [0.025, 0.975])
        return float(drawn.mean()), float(low), float(high)

    def rows(self) -> list[dict[str, object]]:
        """One row a measure; the effective ranks have no null."""
        ranks = {
            "effective rank, exp of entropy": self.polar.entropy_rank,
            "effective rank, participation ratio": self.polar.participation_ratio,
        }
        nulls = {name: self.null_range(name) for name in self.values}
        unknown = (float("nan"),) * 3
        rows: list[dict[str, object]] = []
        for measure, value in (self.values | ranks).items():
            middle, low, high = nulls.get(measure, unknown)
            rows.append(
                {
                    "task": self.task,
                    "map": self.name,
                    "layer": self.layer,
                    "measure": measure,
                    "value": value,
                    "null_mean": middle,
                    "null_low": low,
                    "null_high": high,
                    "n_null": len(self.null[COSINE_Q]) if measure in nulls else 0,
                    "det_q": self.polar.determinant,
                    "rank": self.polar.rank,
                    "least_singular_value": float(self.polar.singular_values[-1]),
                    "error": self.polar.error,
                    "q": self.polar.kind,
                }
                | self.provenance.columns()
            )
        return rows


@dataclass(frozen=True, kw_only=True, eq=False)
class RotationStretch:
    """How several maps turn and stretch their vectors, one `Turn` each, in the order given."""

    turns: tuple[Turn, ...]

    @classmethod
    def of(cls, *several: "RotationStretch") -> "RotationStretch":
        """All of them in one result."""
        return cls(turns=tuple(turn for one in several for turn in one.turns))

    def table(self) -> pd.DataFrame:
        """One row a map and measure: value, mean and central 95 % of it for random vectors."""
        return pd.DataFrame([row for turn in self.turns for row in turn.rows()])

    def spectra(self) -> pd.DataFrame:
        """One row a map and singular value, the largest first."""
        return pd.DataFrame(
            {
                "task": turn.task,
                "map": turn.name,
                "layer": turn.layer,
                "index": index,
                "singular_value": value,
            }
            for turn in self.turns
            for index, value in enumerate(turn.polar.singular_values.tolist(), start=1)
        )


def rotation_stretch(
    maps: LinearMap | Sequence[LinearMap], *, n_null: int = 100, seed: int = 0
) -> RotationStretch:
    """Split each map into Q and Σ, and measure θ in it beside random vectors of equal norm.

    *Task Vectors, Learned Not Extracted*, and docs/analyses.md.

    Args:
        maps: one, or several, such as those of several layers.
        n_null: how many random vectors.
        seed: which ones.

    Returns:
        cos(θ, Qθ), ‖Wθ‖ / ‖θ‖ and cos(θ, Wθ) of each, the singular values with two effective
        ranks, and whether Q reflects.

    Raises:
        InvalidInput: for no maps, a vector that is 0, or `n_null` below 2.
    """
    several = [maps] if isinstance(maps, LinearMap) else list(maps)
    if not several:
        raise InvalidInput("There are no maps to decompose; give at least one.")
    if n_null < 2:
        raise InvalidInput(f"n_null={n_null} gives no range; use 2 or more random vectors.")
    return RotationStretch(turns=tuple(_turn(each, n_null, seed) for each in several))


def _turn(given: LinearMap, n_null: int, seed: int) -> Turn:
    theta = given.theta.detach().cpu().double()
    frame = _frame(len(theta), centred=given.centred)
    seen = theta @ frame
    if not float(seen.norm()):
        raise InvalidInput(
            f"The vector of {given.task!r} at layer {given.layer} is 0 as the model sees it, so it "
            "has no direction to turn; give another."
        )
    error = float(getattr(given, "relative_error", 0.0))  # of a map that is known exactly, none
    polar = Polar.of(frame.T @ given.matrix.detach().cpu().double() @ frame, error)
    random = random_like(seen, n_null, torch_rng(seed, "null vectors of a rotation"))
    return Turn(
        name=given.name,
        task=given.task,
        layer=given.layer,
        theta=given.theta,
        polar=polar,
        frame=frame,
        values={name: float(value) for name, value in polar.measures(seen[None]).items()},
        null={name: values.numpy() for name, values in polar.measures(random).items()},
        provenance=given.provenance,
    )


def _frame(d_model: int, *, centred: bool) -> Float[Tensor, "d_model d"]:
    """Orthonormal columns that span what the model's norms see."""
    whole = torch.eye(d_model, dtype=torch.float64)
    if not centred:
        return whole
    ones = torch.full((d_model, 1), d_model**-0.5, dtype=torch.float64)
    columns: Tensor = torch.linalg.qr(torch.cat([ones, whole[:, 1:]], dim=1)).Q[:, 1:]
    return columns
