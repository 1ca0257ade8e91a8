"""The passes and the scores of the linearity battery, query by query (see `linearity`)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float, Shaped
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.analysis.final_states import answers_of
from mechtv.analysis.integrated_jacobian import directional_derivatives, gauss_legendre
from mechtv.analysis.perturbations import residuals_under
from mechtv.analysis.subject import Subject, random_like
from mechtv.tasks.prompts import Prompts

PREDICTIONS = ("zero-shot", "J(0) θ", "J(θ) θ", "path average", "mean shift", "measured")
SAME = 1e-9  # a spread of effects, as a share of their size, that is only rounding

Place = tuple[str, str, float | None]  # part, name, alpha
Key = tuple[str, str, float | None, str]  # and score
Values = dict[Key, Shaped[np.ndarray, " query"]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Probe:
    """A vector, and two whose sum's effect is compared with the sum of their effects."""

    theta: Float[Tensor, " d_model"]
    first: Float[Tensor, " d_model"]
    second: Float[Tensor, " d_model"]

    @classmethod
    def of(
        cls,
        theta: Float[Tensor, " d_model"],
        second: Float[Tensor, " d_model"] | None,
        rng: torch.Generator,
        *,
        centred: bool,
    ) -> "Probe":
        """A vector with a second one; if None, with two random orthogonal halves of itself."""
        if second is not None:
            return cls(theta=theta, first=theta, second=second)
        across = random_like(theta, 1, rng, cosine=0.0, centred=centred)[0]
        return cls(theta=theta, first=(theta + across) / 2, second=(theta - across) / 2)


@dataclass(frozen=True, kw_only=True, eq=False)
class Battery:
    """All passes, then all scores."""

    model: TransformerBridge
    prompts: Prompts
    others: Prompts
    subject: Subject
    alphas: tuple[float, ...]
    nodes: int

    def of(self, probes: Sequence[Probe], *, progress: bool | None) -> list[Values]:
        """The scores of each query, probe by probe."""
        plain, states = self._measured(self.prompts, [self._shifts(p) for p in probes])
        before, after = self._measured(self.others, [p.theta[None] for p in probes])
        shifts = (after - before).mean(dim=2)[:, 0]
        steps = self._derivatives(probes, progress)
        found = []
        for index in range(len(probes)):
            effects = states[index] - plain
            first_order = torch.cat([steps[index], shifts[index].expand(1, *plain.shape)])
            found.append(dict(self._values(plain, effects, first_order)))
        return found

    def _shifts(self, probe: Probe) -> Float[Tensor, "shift d_model"]:
        scaled = [alpha * probe.theta for alpha in self.alphas]
        pair = [probe.first, probe.second, probe.first + probe.second]
        return torch.stack([probe.theta, *pair, *scaled])

    def _measured(
        self, prompts: Prompts, shifts: Sequence[Float[Tensor, "shift d_model"]]
    ) -> tuple[Float[Tensor, "query d_model"], Float[Tensor, "probe shift query d_model"]]:
        """The plain last residual stream, and that under each probe's shifts."""
        flat = torch.cat([torch.zeros_like(shifts[0][:1]), *shifts])
        states = residuals_under(self.model, prompts, self.subject, flat)
        each = rearrange(states[1:], "(probe shift) q d -> probe shift q d", probe=len(shifts))
        return states[0], each

    def _derivatives(
        self, probes: Sequence[Probe], progress: bool | None
    ) -> Float[Tensor, "probe three query d_model"]:
        """For each probe J(0) theta, J(theta) theta, and the average over the path."""
        alphas, weights = gauss_legendre(self.nodes)
        points = torch.cat([torch.tensor([0.0, 1.0]).to(alphas), alphas])
        thetas = torch.stack([probe.theta for probe in probes])
        at = rearrange(points.to(thetas)[:, None, None] * thetas, "k probe d -> (probe k) d")
        along = thetas.repeat_interleave(len(points), dim=0)
        found = directional_derivatives(
            self.model, self.prompts, self.subject.layer, at, along, progress=progress
        )
        each = rearrange(found, "(probe k) q d -> probe k q d", probe=len(probes))
        path = torch.einsum("k,pkqd->pqd", weights.to(each), each[:, 2:])
        return torch.cat([each[:, :2], path[:, None]], dim=1)

    def _values(
        self,
        plain: Float[Tensor, "query d_model"],
        effects: Float[Tensor, "shift query d_model"],
        first_order: Float[Tensor, "four query d_model"],
    ) -> Iterator[tuple[Key, Shaped[np.ndarray, " query"]]]:
        whole, one, two, both, *scaled = effects
        for alpha, effect in zip(self.alphas, scaled, strict=True):
            key: Place = ("scaling", "alpha θ", alpha)
            yield (*key, "relative norm"), self._norm(effect) / self._norm(whole)
            yield from self._answers(key, plain + effect)
            if alpha:
                yield from self._agreement(key, effect, alpha * whole)
        predictions = [torch.zeros_like(whole), *first_order, whole]
        for name, predicted in zip(PREDICTIONS, predictions, strict=True):
            key = ("first order", name, None)
            yield from self._answers(key, plain + predicted)
            if name in PREDICTIONS[1:-1]:
                yield from self._agreement(key, whole, predicted)
        pair = {"first": one, "second": two, "effect of the sum": both}
        for name, effect in {**pair, "sum of the effects": one + two}.items():
            yield from self._answers(("superposition", name, None), plain + effect)
        key = ("superposition", "sum of the effects", None)
        yield from self._agreement(key, both, one + two)

    def _answers(
        self, key: Place, states: Float[Tensor, "query d_model"]
    ) -> Iterator[tuple[Key, Shaped[np.ndarray, " query"]]]:
        answers = answers_of(self.model, states, self.prompts)
        for score, values in answers.scores().items():
            if score != "logit difference":  # each prediction would choose its own rivals
                yield (*key, score), values

    def _agreement(
        self,
        key: Place,
        effect: Float[Tensor, "query d_model"],
        predicted: Float[Tensor, "query d_model"],
    ) -> Iterator[tuple[Key, Float[np.ndarray, " query"]]]:
        """How well a prediction meets an effect, query by query.

        The mean of an R² over queries is one less the errors' sum of squares over the total; its
        interval takes the total as given.
        """
        effect, predicted = self._seen(effect), self._seen(predicted)
        cosine = torch.cosine_similarity(effect, predicted, dim=1)
        yield (*key, "norm ratio"), (effect.norm(dim=1) / predicted.norm(dim=1)).cpu().numpy()
        yield (*key, "cosine"), cosine.cpu().numpy()
        missed = (effect - predicted).square().sum(dim=1)
        size = effect.square().sum(dim=1).mean()
        spread = (effect - effect.mean(dim=0)).square().sum(dim=1).mean()
        yield (*key, "R²"), (1 - missed / size).cpu().numpy()
        if spread > SAME * size:
            yield (*key, "R² about the mean"), (1 - missed / spread).cpu().numpy()

    def _norm(self, effect: Float[Tensor, "query d_model"]) -> Float[np.ndarray, " query"]:
        norms: Float[np.ndarray, " query"] = self._seen(effect).norm(dim=1).cpu().numpy()
        return norms

    def _seen(self, states: Float[Tensor, "query d_model"]) -> Float[Tensor, "query d_model"]:
        return self.subject.as_seen(self.model, states.double())
