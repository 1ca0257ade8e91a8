"""Other values in theta's place, and what each does to the stream behind the last block."""

from collections.abc import Sequence

import torch
from einops import reduce
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.analysis.subject import Subject, random_like
from mechtv.forward.run import kept, wide
from mechtv.forward.variants import scan
from mechtv.tasks.prompts import Prompts

MOST_BYTES = 2**29  # of final states that are held at once


def perturbed(
    theta: Float[Tensor, " d_model"],
    spread: Sequence[float],
    n: int,
    generator: torch.Generator,
    basis: Float[Tensor, "rank d_model"] | None = None,
) -> Float[Tensor, "n d_model"]:
    """θ + λ ‖θ‖ ε for n random directions ε, the λs taken in turn.

    Args:
        basis: orthonormal; directions are then drawn in its span.
    """
    wide_theta = wide(theta)
    noise = random_like(wide_theta, n, generator)
    if basis is not None:
        basis = basis.to(noise)
        inside = noise @ basis.T @ basis
        noise = inside * (noise.norm(dim=1) / inside.norm(dim=1))[:, None]
    sizes = torch.tensor([spread[i % len(spread)] for i in range(n)]).to(noise)
    found: Tensor = wide_theta + sizes[:, None] * noise
    return found


def mean_effects(
    model: TransformerBridge,
    prompts: Prompts,
    subject: Subject,
    values: Float[Tensor, "vector d_model"],
    show: bool | None = None,
) -> Float[Tensor, "vector d_model"]:
    """How each value, in θ's place, changes the final residual stream, averaged over prompts.

    Returns:
        In float64 on the CPU.
    """
    row = len(prompts) * values.shape[1] * values.element_size()
    with kept(model, prompts, subject.vector()):
        none = [subject.vector(torch.zeros_like(subject.theta))]
        plain = scan(model, prompts, none, output="residual", show=False)
        parts = []
        for some in values.split(max(1, MOST_BYTES // row)):
            vectors = [subject.vector(value) for value in some]
            states = scan(
                model, prompts, vectors, output="residual", title="perturbed vectors", show=show
            )
            parts.append(reduce(wide(states) - wide(plain), "v query d -> v d", "mean"))
    return torch.cat(parts).cpu().double()


def working(
    model: TransformerBridge, theta: Float[Tensor, " d_model"]
) -> Float[Tensor, " d_model"]:
    """A vector in the model's data type, or float32 if that is shorter."""
    return wide(theta.to(torch.promote_types(theta.dtype, model.cfg.dtype)))


def residuals_under(
    model: TransformerBridge,
    prompts: Prompts,
    subject: Subject,
    shifts: Float[Tensor, "point d_model"],
) -> Float[Tensor, "point batch d_model"]:
    """The residual stream behind the last block, at the last tokens, under each shift."""
    with torch.no_grad():
        vectors = [subject.vector(shift) for shift in shifts]
        return wide(scan(model, prompts, vectors, output="residual", show=False)).to(shifts)
