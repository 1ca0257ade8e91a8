"""What each head's OV map would make of a vector: how strong, in which direction, in which words.

A head that attends to the last token alone writes W_O W_V x for what it reads there. Of theta it
reads theta itself in the paper's literal formula, or theta behind the block's norm, whose scale is
frozen at the injected run's (docs/analyses.md, "OV reconstruction"). What a head really adds also
depends on how much it attends to that token, which is told beside it; the exact account is
`mechtv.analysis.decomposition`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from einops import einsum, rearrange, reduce
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.analysis.answers import contrast, rivals
from mechtv.analysis.circuits import Circuits, frozen, post_norm, pre_norm
from mechtv.analysis.decomposition import scale_of
from mechtv.analysis.lens import lens_logits
from mechtv.analysis.subject import Subject
from mechtv.errors import InvalidInput
from mechtv.evaluation.intervals import intervals_of_means
from mechtv.evaluation.provenance import UNKNOWN, Provenance
from mechtv.evaluation.seeds import seed_for
from mechtv.forward.memory import steady
from mechtv.forward.probe import Read, at_last, from_last, observe
from mechtv.forward.run import in_batches, last_logits, wide
from mechtv.forward.setting import device_of
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import SplitName, Task
from mechtv.vectors.vector import TaskVector

Norm = Literal["frozen", "none"]
N_TOKENS = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadMaps:
    """What the OV map of each head at or behind a vector makes of it.

    Args:
        task, split: whose queries the scales and contributions are of; `injection_layer` where
            theta is added.
        norm: how the heads read theta.
        layers: the blocks.
        outputs: what each head writes.
        norms: of the outputs, and `cosines` with theta (both centred under LayerNorm).
        contributions: of each output to each query's logit difference by the direct path: through
            the final norm at the injected run's scale, with the head attending to theta alone.
        attention: of each head from the last token to itself on the injected run, mean over
            queries: the share of its attention that reads theta.
        singular_values: of each head's OV map, largest first.
        tokens: the most favoured tokens of each output (the logit lens).
        provenance: model, weights, template and seed.
    """

    task: str
    injection_layer: int
    split: str
    norm: Norm
    layers: tuple[int, ...]
    outputs: Float[Tensor, "layer head d_model"]
    norms: Float[np.ndarray, "layer head"]
    cosines: Float[np.ndarray, "layer head"]
    contributions: Float[np.ndarray, "layer head query"]
    attention: Float[np.ndarray, "layer head"]
    singular_values: Float[np.ndarray, "layer head rank"]
    tokens: tuple[tuple[tuple[str, ...], ...], ...]
    provenance: Provenance = UNKNOWN

    @property
    def mean(self) -> Float[np.ndarray, "layer head"]:
        """The mean contribution over queries."""
        average: Float[np.ndarray, "layer head"] = self.contributions.mean(axis=-1)
        return average

    @property
    def ranks(self) -> Int[np.ndarray, "layer head"]:
        """The rank of each OV map: at most d_head."""
        largest = self.singular_values[..., :1]
        width = self.outputs.shape[-1]
        above = self.singular_values > largest * width * np.finfo(np.float32).eps
        counts: Int[np.ndarray, "layer head"] = above.sum(axis=-1)
        return counts

    @property
    def effective_ranks(self) -> Float[np.ndarray, "layer head"]:
        """The exponential of the entropy of the normalised singular values (Roy & Vetterli)."""
        total = self.singular_values.sum(axis=-1, keepdims=True)
        p = self.singular_values / np.where(total > 0, total, 1)
        entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(axis=-1)
        found: Float[np.ndarray, "layer head"] = np.exp(entropy)
        return found

    def table(self) -> pd.DataFrame:
        """One row a head: contribution with 95 % interval and n, norm, cosine, spectrum, tokens."""
        low, high = intervals_of_means(self.contributions)
        ranks, effective = self.ranks, self.effective_ranks
        return pd.DataFrame(
            {
                "task": self.task,
                "injection layer": self.injection_layer,
                "split": self.split,
                "norm": self.norm,
                "layer": self.layers[row],
                "head": head,
                "value": float(value),
                "low": float(low[row, head]),
                "high": float(high[row, head]),
                "n": self.contributions.shape[-1],
                "output norm": float(self.norms[row, head]),
                "cosine": float(self.cosines[row, head]),
                "attention to itself": float(self.attention[row, head]),
                "largest singular value": float(self.singular_values[row, head, 0]),
                "rank": int(ranks[row, head]),
                "effective rank": float(effective[row, head]),
                "tokens": " ".join(map(repr, self.tokens[row][head])),
            }
            | self.provenance.columns()
            for (row, head), value in np.ndenumerate(self.mean)
        )


def head_maps(
    model: TransformerBridge,
    task: Task,
    vector: TaskVector,
    *,
    layers: Sequence[int] | None = None,
    norm: Norm = "frozen",
    n: int | None = None,
    split: SplitName = "test",
    seed: int | None = None,
    progress: bool | None = None,
) -> HeadMaps:
    """What every head's OV map makes of theta, as if the head attended to it alone.

    "Task Vectors, Learned Not Extracted" (ICLR 2026), section 4; docs/analyses.md.

    Args:
        vector: one value added to the residual stream at the last prompt token.
        layers: blocks at or behind the vector's; all of them if None.
        norm: `frozen` sends theta through the block's norm as a linear map, the mean of those of
            the queries (and the output through the norm behind attention, where there is one);
            `none` is W_O W_V theta.
        n: how many queries; the whole split if None.
        seed: fixes the splits; the vector's own if None.

    Returns:
        Contributions in logits, against the other labels or, for open answers, the zero-shot run's
        best wrong token.

    Raises:
        InvalidInput: if the vector has another form, the norm is unknown, or a layer is none at or
            behind the vector's.
    """
    if norm not in get_args(Norm):
        raise InvalidInput(f"norm={norm!r} is unknown; use {' or '.join(get_args(Norm))}.")
    subject = Subject.of(model, vector)
    chosen = _layers(model, subject.layer, layers)
    seed = seed_for(vector) if seed is None else seed
    prompts = Prompts.of(model, task, split=split, n=n, seed=seed)
    with torch.no_grad(), steady(model):
        seen = _Seen.of(model, prompts, subject, chosen, title=task.name, show=progress)
        circuits = [Circuits.of(model, layer) for layer in chosen]
        outputs = torch.stack([_output(model, c, subject, seen, norm) for c in circuits])
        return HeadMaps(
            task=task.name,
            injection_layer=subject.layer,
            split=split,
            norm=norm,
            layers=chosen,
            outputs=outputs,
            norms=_numbers(subject.as_seen(model, outputs).norm(dim=-1)),
            cosines=_numbers(_cosines(model, subject, outputs)),
            contributions=_numbers(seen.contributions(model, outputs)),
            attention=_numbers(seen.attention),
            singular_values=_numbers(torch.stack([spectrum(c)[1] for c in circuits])),
            tokens=tuple(_words(model, of_heads) for of_heads in outputs),
            provenance=Provenance.of(model, task, seed),
        )


def spectrum(
    circuits: Circuits,
) -> tuple[
    Float[Tensor, "head d_model rank"],
    Float[Tensor, "head rank"],
    Float[Tensor, "head d_model rank"],
]:
    """The singular value decomposition of each head's OV map: x -> left (singular * (right^T x)).

    It is that of a matrix as wide as a head, from the QR decompositions of W_O and W_V; no matrix
    as wide as the model is formed.

    Returns:
        What the map writes, its singular values (largest first), and what it reads.
    """
    reads, r = torch.linalg.qr(wide(circuits.values))
    writes, s = torch.linalg.qr(rearrange(wide(circuits.outputs), "head w d -> head d w"))
    inner = einsum(s, r, "head o w, head i w -> head o i")
    u, singular, vh = torch.linalg.svd(inner, full_matrices=False)
    return writes @ u, singular, reads @ rearrange(vh, "head rank i -> head i rank")


@dataclass(frozen=True, kw_only=True, eq=False)
class _Seen:
    """What the injected run shows: mean scales by hook point, attention, and the final readers."""

    scales: dict[str, Float[Tensor, " one"]]
    attention: Float[Tensor, "layer head"]
    final_scale: Float[Tensor, "query 1"]
    direction: Float[Tensor, "query d_model"]

    @classmethod
    def of(
        cls,
        model: TransformerBridge,
        prompts: Prompts,
        subject: Subject,
        layers: Sequence[int],
        *,
        title: str,
        show: bool | None,
    ) -> "_Seen":
        """One injected and one plain pass."""
        final = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
        scales = [f"{name}.hook_scale" for layer in layers for name in _norms(model, layer)]
        patterns = [f"blocks.{layer}.attn.hook_pattern" for layer in layers]
        reads: dict[str, Read] = dict.fromkeys([final, *scales], at_last)
        reads |= dict.fromkeys(patterns, _to_itself)

        def compute(batch: Prompts) -> Float[Tensor, "batch column"]:
            found = observe(model, batch, reads, subject.vector())
            placed = {name: wide(x).to(device_of(model)) for name, x in found.items()}
            direction = contrast(model, batch, rivals(last_logits(model, batch), batch))
            scale = scale_of(model.ln_final, placed[final])
            inverse = [1 / placed[name] for name in scales]
            attention = [placed[name] for name in patterns]
            return torch.cat([scale, wide(direction), *inverse, *attention], dim=1)

        columns = in_batches(prompts, compute, title=f"head maps, {title}", show=show)
        final_scale, direction, inverse, attention = columns.split(
            [1, model.cfg.d_model, len(scales), len(layers) * model.cfg.n_heads], dim=1
        )
        mean = reduce(attention, "query (layer head) -> layer head", "mean", layer=len(layers))
        means = 1 / inverse.mean(dim=0)  # the mean of the maps has the mean of 1 / scale
        return cls(
            scales=dict(zip(scales, means[:, None], strict=True)),
            attention=mean,
            final_scale=final_scale,
            direction=direction,
        )

    def behind(
        self, name: str, norm: Any | None, x: Float[Tensor, "*batch d_model"]
    ) -> Float[Tensor, "*batch d_model"]:
        """States behind a frozen norm, where the family has it."""
        return x if norm is None else frozen(norm, self.scales[f"{name}.hook_scale"], x)

    def contributions(
        self, model: TransformerBridge, outputs: Float[Tensor, "layer head d_model"]
    ) -> Float[Tensor, "layer head query"]:
        """What each output adds to each query's logit difference, by the direct path."""
        unscaled = frozen(model.ln_final, torch.ones_like(outputs[..., :1]), outputs)
        readers = self.direction / self.final_scale
        return einsum(unscaled, readers, "layer head d, query d -> layer head query")


def _output(
    model: TransformerBridge, circuits: Circuits, subject: Subject, seen: _Seen, norm: Norm
) -> Float[Tensor, "head d_model"]:
    """What the heads of one block write."""
    theta, layer = wide(subject.theta), circuits.layer
    if norm == "none":
        return wide(circuits.ov(theta))
    written = wide(circuits.ov(seen.behind(f"blocks.{layer}.ln1", pre_norm(model, layer), theta)))
    return seen.behind(f"blocks.{layer}.ln1_post", post_norm(model, layer), written)


def _norms(model: TransformerBridge, layer: int) -> dict[str, Any]:
    """The norms before and behind a block's attention, as far as the family has them."""
    norms = {"ln1": pre_norm(model, layer), "ln1_post": post_norm(model, layer)}
    return {f"blocks.{layer}.{name}": norm for name, norm in norms.items() if norm is not None}


def _to_itself(
    pattern: Float[Tensor, "batch head query key"], prompts: Prompts
) -> Float[Tensor, "batch head"]:
    """The last token's attention to itself."""
    return at_last(rearrange(from_last(pattern, prompts), "b head key -> b key head"), prompts)


def _cosines(
    model: TransformerBridge, subject: Subject, outputs: Float[Tensor, "layer head d_model"]
) -> Float[Tensor, "layer head"]:
    theta = subject.as_seen(model, subject.theta.to(outputs))
    return torch.cosine_similarity(subject.as_seen(model, outputs), theta, dim=-1)


def _words(
    model: TransformerBridge, outputs: Float[Tensor, "head d_model"]
) -> tuple[tuple[str, ...], ...]:
    """The most favoured tokens of each state."""
    best = lens_logits(model, outputs).topk(N_TOKENS, dim=-1).indices.tolist()
    return tuple(tuple(model.tokenizer.decode([token]) for token in ids) for ids in best)


def _layers(model: TransformerBridge, first: int, layers: Sequence[int] | None) -> tuple[int, ...]:
    """The blocks that are asked for, in rising order."""
    possible = range(first, model.cfg.n_layers)
    wanted = list(possible if layers is None else layers)
    if not wanted or len(set(wanted)) < len(wanted) or set(wanted) - set(possible):
        raise InvalidInput(
            f"layers={wanted} must be distinct blocks at or behind the vector's, from {first} to "
            f"{model.cfg.n_layers - 1}."
        )
    return tuple(sorted(wanted))


def _numbers(x: Float[Tensor, "*any"]) -> Float[np.ndarray, "*any"]:
    found: Float[np.ndarray, "*any"] = x.cpu().double().numpy()
    return found
