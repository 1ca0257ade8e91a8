"""What each part of an explanation found, in a sentence computed from its numbers."""

from collections.abc import Callable
from typing import Any

import numpy as np

from mechtv.analysis.ablation import Ablation
from mechtv.analysis.alignment import Alignment
from mechtv.analysis.attention import AttentionShares
from mechtv.analysis.decomposition import Decomposition
from mechtv.analysis.integrated_jacobian import IntegratedJacobian
from mechtv.analysis.linearity import Linearity
from mechtv.analysis.logit_lens import Lens
from mechtv.analysis.polar import COSINE_Q, STRETCH
from mechtv.analysis.propagation import FULL, MAPPED, MEAN_EFFECT, Propagation
from mechtv.analysis.readers import READERS, Readers
from mechtv.analysis.reconstructed import Reconstruction
from mechtv.analysis.rotation import RotationStretch
from mechtv.evaluation.intervals import Estimate
from mechtv.plots.style import estimate_text, fixed
from mechtv.report.words import p_text
from mechtv.study.explain import Finding, HeadRankings

ACCURACY, LOG_P = "accuracy, full vocabulary", "log-probability"
N_NAMED = 5


def finding(part: Finding) -> str | None:
    """The sentence of a part, if it has one: what it found, or why it was refused."""
    if part.refusal:
        return f"Not done: {part.refusal}"
    say = FINDINGS.get(part.name)
    return None if say is None else say(part.result)


def _reconstruction(found: Reconstruction) -> str:
    nulls = {kind: found.recovered("OV", kind) for part, kind in found.nulls if part == "OV"}
    random = ", ".join(f"{_percent(e)} with the same {kind}" for kind, e in nulls.items())
    mlp = "MLP" in found.outcomes
    return (
        f"What the OV circuits make of θ, put in its place, recovers "
        f"{_percent(found.recovered('OV'))} of its gain in log-probability"
        + (f", what the MLPs make of it {_percent(found.recovered('MLP'))}" if mlp else "")
        + (f"; random vectors in the OV circuits’ place recover {random}." if random else ".")
    )


def _readers(found: Readers) -> str:
    effects = found.effects()
    shapley = effects[effects["effect"] == "Shapley value"].set_index("reader")
    shares = ", ".join(
        f"{name} {_share(*shapley.loc[name, ['share', 'share_low', 'share_high']])} "
        f"(alone: accuracy {fixed(found.of(name).estimates()[ACCURACY].value)})"
        for name in READERS
    )
    return f"Shapley shares of the readers of θ in its gain in log-probability: {shares}."


def _decomposition(found: Decomposition) -> str:
    kinds = found.by_kind()
    parts = ", ".join(
        f"{_KINDS.get(kind, kind)} {_whole(share)} %"
        for kind, share in zip(kinds["kind"], kinds["share"], strict=True)
    )
    return (
        f"The change of the answer’s logit difference, {fixed(float(found.change.mean()))} on "
        f"average, is made up of: {parts}. All parts add up to the measured change of the residual "
        f"stream with a relative error of at most {found.error:.0e}."
    )


def _heads(found: HeadRankings) -> str:
    first = found.saliency.top(min(N_NAMED, found.saliency.importance.size))
    rho = found.saliency.compare(found.ablation)
    return (
        f"Most salient heads (layer, head): {', '.join(map(str, first))}. Over all {rho.n} heads "
        f"Spearman’s ρ of saliency and exhaustive ablation is {estimate_text(rho)} (95 % over "
        "resampled heads)."
    )


def _ablation(found: Ablation) -> str:
    intact, ablated = (answers.estimates()[ACCURACY] for answers in (found.intact, found.ablated))
    drawn = found.random_values(ACCURACY)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return (
        f"Without its {len(found.heads)} key heads ({found.mode} ablation) accuracy goes from "
        f"{estimate_text(intact)} to {estimate_text(ablated)}; without as many random heads it "
        f"is {fixed(float(drawn.mean()))}, 95 % of {len(drawn)} sets in "
        f"[{fixed(float(low))}, {fixed(float(high))}] "
        f"(log-probability: p {p_text(found.p_value())})."
    )


def _attention(found: AttentionShares) -> str:
    key, random = found.estimates("key"), found.estimates("random")
    return (
        "From the last token, key heads attend to the first token with "
        f"{estimate_text(key['first token'])} and to the last token itself with "
        f"{estimate_text(key['last token'])}; random heads with "
        f"{estimate_text(random['first token'])} and {estimate_text(random['last token'])}."
    )


def _propagation(found: Propagation) -> str:
    accuracy = {name: answers.estimates()[ACCURACY] for name, answers in found.answers.items()}
    return (
        f"A linear map fitted to {found.n_perturbations} perturbations of θ is {found.describe()}; "
        f"on held-out ones (brackets are over them) and other queries R² is "
        f"{estimate_text(found.r2)} counted from no "
        f"effect, and {estimate_text(found.r2_centred)} for the effects’ variation about their "
        f"mean ({estimate_text(found.same_queries.r2(centred=True))} on the queries of the fit). "
        f"Added at the end, Wθ has "
        f"accuracy {estimate_text(accuracy[MAPPED])} and θ’s own mean effect "
        f"{estimate_text(accuracy[MEAN_EFFECT])}, where θ has {estimate_text(accuracy[FULL])}."
    )


def _jacobian(found: IntegratedJacobian) -> str:
    return (
        f"The integrated Jacobian ({found.nodes} nodes, {found.n} queries) maps θ to its measured "
        f"mean effect with a relative error of {found.error:.1e}."
    )


def _rotation(found: RotationStretch) -> str:
    sentences = []
    for turn in found.turns:
        _, low, high = turn.null_range(COSINE_Q)
        _, least, most = turn.null_range(STRETCH)
        sentences.append(
            f"In the {turn.name} map cos(θ, Qθ) is {fixed(turn.values[COSINE_Q])} (random vectors: "
            f"[{fixed(low)}, {fixed(high)}]) and θ is stretched {fixed(turn.values[STRETCH])} "
            f"times ([{fixed(least)}, {fixed(most)}]); Q: {turn.polar.kind}."
        )
    return " ".join(sentences)


def _alignment(found: Alignment) -> str:
    random, _, high = found.span.of_random
    values = ", ".join(f"{name} {fixed(found[name])}" for name in found.names)
    return (
        f"Task alignment, on {found.span.dim} of {found.span.width} dimensions: {values}; random "
        f"vectors {fixed(random)} (up to {fixed(high)})."
    )


def _linearity(found: Linearity) -> str:
    half = found.estimate("scaling", "alpha θ", "cosine", alpha=0.5)
    accuracy = {
        name: found.estimate("first order", name, ACCURACY)
        for name in ("J(0) θ", "path average", "mean shift", "measured")
    }
    return (
        f"Half of θ has an effect whose cosine with half of θ’s effect is {estimate_text(half)}. "
        f"First-order predictions: J(0)θ gives accuracy {estimate_text(accuracy['J(0) θ'])}, the "
        f"average along the path {estimate_text(accuracy['path average'])}, one shift for all "
        f"queries {estimate_text(accuracy['mean shift'])}, where θ has "
        f"{estimate_text(accuracy['measured'])}."
    )


def _lens(found: Lens) -> str | None:
    if found.injected is None:
        return None
    accuracy = found.injected.correct.mean(axis=1)
    if not accuracy[-1]:
        return "The injected run gives no right answer, so there is no depth at which it has half."
    half = int(np.argmax(accuracy >= accuracy[-1] / 2))
    return (
        f"Under the logit lens the injected run reaches half of its final accuracy "
        f"({fixed(float(accuracy[-1]))}) at depth {half} of {len(accuracy) - 1}."
    )


FINDINGS: dict[str, Callable[[Any], str | None]] = {
    "reconstruction": _reconstruction,
    "readers": _readers,
    "decomposition": _decomposition,
    "heads": _heads,
    "ablation": _ablation,
    "attention": _attention,
    "propagation": _propagation,
    "jacobian": _jacobian,
    "rotation": _rotation,
    "alignment": _alignment,
    "linearity": _linearity,
    "lens": _lens,
}

_KINDS = {"theta": "θ itself", "values": "heads’ values", "pattern": "attention patterns"}


def _percent(estimate: Estimate) -> str:
    return _share(estimate.value, estimate.low, estimate.high)


def _share(value: float, low: float, high: float) -> str:
    """A share in percent with its interval, where it is known."""
    if np.isnan(value):
        return "an unknown share"
    known = not np.isnan([low, high]).any()
    interval = f" [{_whole(low)}, {_whole(high)}]" if known else ""
    return f"{_whole(value)} %{interval}"


def _whole(share: float) -> str:
    return fixed(100 * share, 0)
