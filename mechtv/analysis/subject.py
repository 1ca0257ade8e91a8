"""The vector under study: one value added to the residual stream at the last token.

The papers' analyses speak of a theta that is added at the input of block l at the last token
(docs/analyses.md). Whatever method made a vector, they take it if it has that form.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.forward.setting import device_of
from mechtv.vectors.card import Card
from mechtv.vectors.edits import Add, Edit
from mechtv.vectors.inject import check_fits
from mechtv.vectors.site import Site
from mechtv.vectors.vector import TaskVector

ROUNDING = 1e-6  # of a vector's norm: what centring may leave of a constant one


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """Theta, and the block at whose input it is added.

    Args:
        theta: detached, on the model's device, in the vector's own data type.
    """

    layer: int
    theta: Float[Tensor, " d_model"]

    @classmethod
    def of(cls, model: TransformerBridge, vector: TaskVector) -> "Subject":
        """What a vector adds, and where.

        Raises:
            InvalidInput: unless the vector adds one value at the input of one block (or, which is
                the same place, at the output of the block before), at position -1 of the prompt;
                or if the model's norms see nothing of it.
        """
        for edit in vector.edits:
            check_fits(model, edit)
        edit, site = vector.edits[0], vector.edits[0].site
        is_stream = site.component in ("resid_pre", "resid_post")
        layer = site.layer + (site.component == "resid_post")
        if (
            len(vector.edits) > 1
            or not isinstance(edit.operation, Add)
            or not is_stream
            or site.positions != (-1,)
            or vector.acts_on == "new"
        ):
            raise InvalidInput(
                f"This analysis is of one value added to the residual stream at the last prompt "
                f"token; the vector edits {', '.join(_named(e) for e in vector.edits)}, acting on "
                f"{vector.acts_on!r}. Give a vector with a single Add at resid_pre, position -1."
            )
        if layer >= model.cfg.n_layers:
            raise InvalidInput(
                f"The vector is added behind the last block (layer {site.layer}), where nothing is "
                "left to explain; give one that is added before a block."
            )
        value = edit.operation.value.detach().to(device_of(model))
        subject = cls(layer=layer, theta=value.reshape(-1))
        exact = subject.theta.cpu().double()
        seen, whole = (float(x.norm()) for x in (subject.as_seen(model, exact), exact))
        if not seen > ROUNDING * whole:
            raise InvalidInput(
                f"The vector has norm {whole:.3g}, as this model's norms see it {seen:.3g}: there "
                "is no effect to explain; give a vector that is neither zero nor constant nor NaN."
            )
        return subject

    def vector(self, theta: Float[Tensor, " d_model"] | None = None) -> TaskVector:
        """Theta, or another value in its place, as a task vector."""
        value = self.theta if theta is None else theta
        edit = Edit(site=Site(layer=self.layer), operation=Add(value=value))
        return TaskVector(edits=(edit,), card=Card(method="analysis"))

    def is_centred(self, model: TransformerBridge) -> bool:
        """Whether norms and cosines are of the centred vector, since every norm centres it."""
        return not bool(getattr(model.ln_final, "uses_rms_norm", False))

    def as_seen(
        self, model: TransformerBridge, states: Float[Tensor, "*batch d_model"]
    ) -> Float[Tensor, "*batch d_model"]:
        """States as the model's norms see them: centred under LayerNorm."""
        if not self.is_centred(model):
            return states
        return states - states.mean(dim=-1, keepdim=True)


def random_like(
    theta: Float[Tensor, " d_model"],
    n: int,
    generator: torch.Generator,
    cosine: float | None = None,
    *,
    centred: bool = False,
) -> Float[Tensor, "n d_model"]:
    """Random vectors of theta's norm; with a `cosine`, otherwise random but at that angle to it.

    Args:
        centred: all of it for centred vectors, as LayerNorm sees them.

    Raises:
        InvalidInput: if the cosine is not between -1 and 1.
    """
    if cosine is not None and not -1 <= cosine <= 1:
        raise InvalidInput(f"cosine={cosine} is none; use -1 to 1.")
    drawn = torch.randn(n, len(theta), generator=generator, dtype=torch.float64)
    if centred:
        theta = theta - theta.mean()
        drawn = drawn - drawn.mean(dim=1, keepdim=True)
    unit = (theta / theta.norm()).cpu().double()
    if cosine is not None:
        across = drawn - (drawn @ unit)[:, None] * unit
        across = across / across.norm(dim=1, keepdim=True)
        drawn = cosine * unit + (1 - cosine**2) ** 0.5 * across
    scaled: Tensor = drawn * (float(theta.norm()) / drawn.norm(dim=1, keepdim=True))
    return scaled.to(theta)


def _named(edit: Edit) -> str:
    return f"{edit.site} ({type(edit.operation).__name__})"
