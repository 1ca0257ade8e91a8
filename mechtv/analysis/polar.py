"""The polar factors of a linear map: what turns a vector, and what stretches it before."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cosine_similarity

COSINE_Q, STRETCH, COSINE_W = "cos(θ, Qθ)", "‖Wθ‖ / ‖θ‖", "cos(θ, Wθ)"


@dataclass(frozen=True, kw_only=True, eq=False)
class Polar:
    """W = Q Σ, with Q orthogonal and Σ symmetric, no eigenvalue below 0.

    Args:
        singular_values: largest first.
        error: how large a singular value the map's own error can make.
        rank: of W. Below the full one Q is not unique: this one comes from the singular vectors.
    """

    rotation: Float[Tensor, "d d"]
    stretch: Float[Tensor, "d d"]
    singular_values: Float[Tensor, " d"]
    rank: int
    error: float = 0.0

    @classmethod
    def of(cls, matrix: Float[Tensor, "d d"], relative_error: float = 0.0) -> "Polar":
        """The decomposition, in float64 on the CPU.

        Args:
            relative_error: of the matrix, as a share of its Frobenius norm. Spread evenly over the
                directions, it moves singular values by about that share of their root mean square.
        """
        u, s, vt = torch.linalg.svd(matrix.cpu().double())
        smallest = s.max() * len(s) * torch.finfo(s.dtype).eps
        return cls(
            rotation=u @ vt,
            stretch=(vt.T * s) @ vt,
            singular_values=s,
            rank=int((s > smallest).sum()),
            error=relative_error * float(s.square().mean().sqrt()),
        )

    @property
    def determinant(self) -> int:
        """That of Q: 1 for a rotation, -1 for one with a reflection."""
        return int(torch.linalg.slogdet(self.rotation).sign)

    @property
    def entropy_rank(self) -> float:
        """The effective rank exp(-Σ p log p), p the singular values over their sum.

        Roy and Vetterli 2007, *The Effective Rank*, section 3.
        """
        p = self.singular_values / self.singular_values.sum()
        return float(torch.special.entr(p).sum().exp())

    @property
    def participation_ratio(self) -> float:
        """The effective rank (Σ s²)² / Σ s⁴, s the singular values."""
        squares = self.singular_values.square()
        return float(squares.sum().square() / squares.square().sum())

    @property
    def kind(self) -> str:
        """What Q is."""
        full = len(self.singular_values)
        if self.rank < full:
            return f"not unique: W has rank {self.rank} of {full}"
        least = float(self.singular_values[-1])
        if least < self.error:
            return (
                f"rotation or reflection, undetermined: the least singular value, {least:.1e}, is "
                f"below the map's error of {self.error:.1e}"
            )
        return "rotation" if self.determinant > 0 else "rotation with a reflection"

    def measures(self, vectors: Float[Tensor, "vector d"]) -> dict[str, Float[Tensor, " vector"]]:
        """How each vector is turned and stretched."""
        vectors = vectors.cpu().double()
        turned = vectors @ self.rotation.T
        mapped = vectors @ self.stretch @ self.rotation.T
        return {
            COSINE_Q: cosine_similarity(vectors, turned, dim=1),
            STRETCH: mapped.norm(dim=1) / vectors.norm(dim=1),
            COSINE_W: cosine_similarity(vectors, mapped, dim=1),
        }
