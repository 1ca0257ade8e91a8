"""Where a vector's effect comes from: its final change, split exactly into what each part adds.

Theta, added at the input of block l at the last token N, changes the residual stream behind the
last block by

    theta + sum over blocks >= l of (change of the attention output + change of the MLP output).

With c the attention of N, v the values and W_O the output map of a head, the first change is the
sum over heads of

    values   c_NN (v'_N - v_N) W_O                  other values under the unchanged pattern
    pattern  sum over j of (c'_Nj - c_Nj) v_j W_O   another pattern over the unchanged values
    product  (c'_NN - c_NN) (v'_N - v_N) W_O        both (primes: the injected run)

since no value before N changes; biases cancel (docs/analyses.md, "exact decomposition"). Two
kinds of norm are divided by the scale s of the run, which is no sum of parts. They are split
likewise: x'/s' - x/s = (x' - x)/s' + (x/s' - x/s). The first term is the parts' own, at the
injected run's scale; the second is a part by itself, called "scale". That is so for the norms
behind attention and MLP, where a family has them, and for the final norm, through which every part
is read as a contribution to the logit difference (before a soft cap, if any).

This is an account, not an intervention: what an MLP adds is its own part, also where it answers to
what heads wrote before it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from einops import einsum, rearrange, repeat
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.analysis.answers import contrast, rivals
from mechtv.analysis.circuits import Circuits, frozen, gain, normed, post_norm
from mechtv.analysis.subject import Subject
from mechtv.errors import InvalidInput
from mechtv.evaluation.intervals import intervals_of_means
from mechtv.evaluation.provenance import UNKNOWN, Provenance
from mechtv.evaluation.seeds import seed_for
from mechtv.forward.memory import steady
from mechtv.forward.probe import Read, at_last, from_last, observe
from mechtv.forward.run import in_batches, wide
from mechtv.forward.setting import device_of
from mechtv.forward.unembed import unembedded
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import SplitName, Task
from mechtv.vectors.vector import TaskVector

Kind = Literal[
    "theta",
    "values",
    "pattern",
    "product",
    "attention scale",
    "MLP",
    "MLP scale",
    "final norm scale",
]
Column = Literal["kind", "layer", "head"]
Against = Literal["zero-shot", "injected"]

LARGEST_ERROR = 0.1  # of the effect, between the parts' sum and the whole; bfloat16 has 0.02
BATCH = 32  # prompts at a time: every block's values are kept at all of their tokens
ROWS = 256  # parts whose intervals are resampled at a time


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the change: its kind, the block and the head, where it has them."""

    kind: Kind
    layer: int | None = None
    head: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Decomposition:
    """What each part of a vector's effect contributes, query by query.

    Args:
        task, split: whose queries; `layer` the block at whose input theta is added.
        queries: in order.
        against: whose best wrong token the answer stands against, where answers are open.
        parts: all of them, in the order of the stream.
        contributions: of each part to the answer's logit difference.
        norms: of each part in the residual stream (centred under LayerNorm); NaN for the final
            norm's scale, which is no part of the stream.
        change: the measured change of the logit difference.
        state_change: the norm of the measured change of the final residual.
        errors: the norm of what the parts leave of it, over its own norm.
        provenance: model, weights, template and seed.
    """

    task: str
    layer: int
    split: str
    queries: tuple[tuple[str, ...], ...]
    against: Against
    parts: tuple[Part, ...]
    contributions: Float[np.ndarray, "part query"]
    norms: Float[np.ndarray, "part query"]
    change: Float[np.ndarray, " query"]
    state_change: Float[np.ndarray, " query"]
    errors: Float[np.ndarray, " query"]
    provenance: Provenance = UNKNOWN

    @property
    def error(self) -> float:
        """The largest relative error of any query: rounding, if all parts are there."""
        return float(self.errors.max())

    def table(self) -> pd.DataFrame:
        """One row a part: its mean contribution with 95 % interval, its share and its norm."""
        return self.summed("kind", "layer", "head").assign(norm=self.norms.mean(axis=1))

    def by_kind(self) -> pd.DataFrame:
        """One row a kind, summed over blocks and heads."""
        return self.summed("kind")

    def by_block(self) -> pd.DataFrame:
        """One row a block, summed over heads and kinds, besides theta and the final norm's scale.

        The kind of a block's row is "block".
        """
        kinds = ["block" if part.layer is not None else part.kind for part in self.parts]
        layers = [part.layer for part in self.parts]
        return self._summed({"kind": kinds, "layer": layers})

    def by_head(self) -> pd.DataFrame:
        """One row a head: values, pattern and product together."""
        rows = self.summed("layer", "head")
        return rows[rows["head"].notna()].reset_index(drop=True)

    def summed(self, *by: Column) -> pd.DataFrame:
        """The contributions, summed over parts that agree in some columns.

        Returns:
            One row a group: mean over queries, 95 % bootstrap interval, n, the share of the mean
            measured change, that change, and the largest relative error of the split.

        Raises:
            InvalidInput: for no column or an unknown one.
        """
        if not by or set(by) - set(get_args(Column)):
            raise InvalidInput(f"by={by!r}; give one or more of {', '.join(get_args(Column))}.")
        return self._summed({name: [getattr(part, name) for part in self.parts] for name in by})

    def _summed(self, labels: Mapping[str, Sequence[str | int | None]]) -> pd.DataFrame:
        """The contributions, summed over parts with equal labels."""
        keys = list(zip(*labels.values(), strict=True))
        place = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        values = np.zeros((len(place), len(self.change)))
        np.add.at(values, [place[key] for key in keys], self.contributions)
        low, high = _intervals(values)
        whole = float(self.change.mean())
        about = {"task": self.task, "injection layer": self.layer, "split": self.split}
        rows = pd.DataFrame(
            about
            | dict(zip(labels, key, strict=True))
            | {"value": value, "low": low[i], "high": high[i], "n": len(self.change)}
            | {"share": value / (whole or np.nan), "change": whole, "error": self.error}
            | self.provenance.columns()
            for i, (key, value) in enumerate(zip(place, values.mean(axis=1), strict=True))
        )
        return rows.astype({name: "Int64" for name in ("layer", "head") if name in labels})


def decompose(
    model: TransformerBridge,
    task: Task,
    vector: TaskVector,
    *,
    n: int | None = None,
    split: SplitName = "test",
    seed: int | None = None,
    against: Against = "zero-shot",
    progress: bool | None = None,
) -> Decomposition:
    """Split what a vector does on zero-shot prompts into parts that add up to it exactly.

    docs/analyses.md, "exact decomposition"; the honest version of the claim that the effect goes
    through OV circuits ("Task Vectors, Learned Not Extracted", ICLR 2026, section 4).

    Args:
        vector: one value added to the residual stream at the last prompt token.
        n: how many queries; the whole split if None.
        seed: fixes the splits; the vector's own if None.
        against: for open answers, the run whose best wrong token is the answer's rival. That of
            the zero-shot run is what theta has to beat; that of the injected run is chosen after
            the fact, so the change looks smaller, even negative. Labels always stand against the
            other labels.

    Returns:
        Contributions in logits; `error` says how nearly their parts are all of the change (1e-4 or
        less in float32; more in shorter types).

    Raises:
        InvalidInput: if the vector has another form, `against` is unknown, or the parts leave more
            than 10 % of the change: then the blocks do something else besides.
    """
    if against not in get_args(Against):
        raise InvalidInput(f"against={against!r} is unknown; use {' or '.join(get_args(Against))}.")
    subject = Subject.of(model, vector)
    seed = seed_for(vector) if seed is None else seed
    prompts = Prompts.of(model, task, split=split, n=n, seed=seed)
    with torch.no_grad(), steady(model):
        columns = in_batches(
            prompts,
            lambda batch: decomposed(model, batch, subject, against),
            batch_size=BATCH,
            title=f"decomposition, {task.name}",
            show=progress,
        )
    parts = parts_of(model, subject.layer)
    _check_all_is_there(*columns[:, -2:].T)
    return Decomposition(
        task=task.name,
        layer=subject.layer,
        split=split,
        queries=tuple(example.key for example in prompts.examples),
        against=against,
        parts=parts,
        contributions=columns[:, : len(parts)].T.numpy(),
        norms=columns[:, len(parts) : -3].T.numpy(),
        change=columns[:, -3].numpy(),
        state_change=columns[:, -2].numpy(),
        errors=columns[:, -1].numpy(),
        provenance=Provenance.of(model, task, seed),
    )


def parts_of(model: TransformerBridge, layer: int) -> tuple[Part, ...]:
    """All parts of a vector that is added at the input of a block, in the order of the stream."""
    heads, parts = range(model.cfg.n_heads), [Part(kind="theta")]
    for block in range(layer, model.cfg.n_layers):
        for kind in ("values", "pattern", "product"):
            parts += [Part(kind=kind, layer=block, head=head) for head in heads]
        if post_norm(model, block) is not None:
            parts.append(Part(kind="attention scale", layer=block))
        parts.append(Part(kind="MLP", layer=block))
        if _post_mlp(model, block) is not None:
            parts.append(Part(kind="MLP scale", layer=block))
    return (*parts, Part(kind="final norm scale"))


def decomposed(
    model: TransformerBridge, prompts: Prompts, subject: Subject, against: Against = "zero-shot"
) -> Float[Tensor, "batch column"]:
    """Each row's contributions, norms, two measured changes and error; see `Decomposition`."""
    runs = Runs.of(model, prompts, subject)
    before, after = (run[_final(model)] for run in (runs.before, runs.after))
    norm = model.ln_final
    chosen = before if against == "zero-shot" else after
    logits = unembedded(model, chosen.to(model.cfg.dtype)[None])[0]
    direction = contrast(model, prompts, rivals(logits, prompts)).to(before)
    scale = scale_of(norm, after)
    rescaled = frozen(norm, scale, before) - frozen(norm, scale_of(norm, before), before)
    contributions, norms, left = [], [], after - before
    for part in runs.each():
        read = frozen(norm, scale[:, None], part)
        contributions.append(einsum(read, direction, "b part d, b d -> b part"))
        norms.append(subject.as_seen(model, part).norm(dim=-1))
        left = left - part.sum(dim=1)
    contributions.append((rescaled * direction).sum(dim=-1, keepdim=True))
    norms.append(torch.full_like(norms[0], torch.nan))
    change = ((normed(norm, after) - normed(norm, before)) * direction).sum(dim=-1)
    moved = (after - before).norm(dim=-1)
    measured = torch.stack([change, moved, left.norm(dim=-1) / moved], dim=1)
    return torch.cat([*contributions, *norms, measured], dim=1).cpu().double()


def _check_all_is_there(moved: Float[Tensor, " query"], errors: Float[Tensor, " query"]) -> None:
    """Whether the parts are all, but for rounding, over all queries together."""
    left = float((moved * errors).norm() / moved.norm())
    if left > LARGEST_ERROR:
        raise InvalidInput(
            "This model's blocks change the residual stream in other ways than by heads and MLPs "
            f"as they are split here: {left:.0%} of the vector's effect is in no part; use another "
            "model, or float32 if its weights are of a shorter type."
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Runs:
    """The plain and the injected pass over some prompts, as far as the parts need them."""

    model: TransformerBridge
    prompts: Prompts
    subject: Subject
    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: TransformerBridge, prompts: Prompts, subject: Subject) -> "Runs":
        """Two full passes."""
        reads = _reads(model, subject.layer)
        everywhere = {name: _whole for name in reads if name.endswith("hook_v")}
        return cls(
            model=model,
            prompts=prompts,
            subject=subject,
            before=_observed(model, prompts, reads | everywhere),
            after=_observed(model, prompts, reads, subject.vector()),
        )

    def each(self) -> Iterator[Float[Tensor, "batch part d_model"]]:
        """The parts of the residual's change in the order of `parts_of`, some at a time."""
        theta = self.subject.theta.to(self.before[_final(self.model)])
        yield repeat(theta, "d -> b 1 d", b=len(self.prompts))
        for layer in range(self.subject.layer, self.model.cfg.n_layers):
            heads = torch.cat(list(self.heads(layer)), dim=1)
            yield from self._behind(post_norm(self.model, layer), f"blocks.{layer}.ln1_post", heads)
            mlp, name = _post_mlp(self.model, layer), f"blocks.{layer}.ln2_post"
            output = f"{name}.hook_in" if mlp is not None else f"blocks.{layer}.hook_mlp_out"
            yield from self._behind(mlp, name, self._change(output)[:, None])

    def heads(self, layer: int) -> Iterator[Float[Tensor, "batch head d_model"]]:
        """What each head of a block adds through its values, its pattern, and their product."""
        name = f"blocks.{layer}.attn"
        outputs = Circuits.of(self.model, layer).outputs
        share = len(outputs) // self.before[f"{name}.hook_v"].shape[-2]
        values = repeat(self.before[f"{name}.hook_v"], "b key kv w -> b key (kv s) w", s=share)
        there = repeat(self.after[f"{name}.hook_v"], "b kv w -> b (kv s) w", s=share)
        shift = there - at_last(values, self.prompts)
        pattern = self.before[f"{name}.hook_pattern"]
        attention = self._to_itself(pattern)
        moved = self._change(f"{name}.hook_pattern")
        for inner in (
            attention * shift,
            einsum(moved, values, "b head key, b key head w -> b head w"),
            self._to_itself(moved) * shift,
        ):
            yield einsum(inner, outputs.to(inner), "b head w, head w d -> b head d")

    def _behind(
        self, norm: Any | None, name: str, parts: Float[Tensor, "batch part d_model"]
    ) -> Iterator[Float[Tensor, "batch part d_model"]]:
        """Parts of a sublayer's output as they reach the stream, and its norm's scale part."""
        if norm is None:
            yield parts
            return
        new, old = (run[f"{name}.hook_scale"][:, None] for run in (self.after, self.before))
        output = self.before[f"{name}.hook_in"][:, None]
        yield frozen(norm, new, parts)
        yield frozen(norm, new, output) - frozen(norm, old, output)

    def _change(self, name: str) -> Tensor:
        return self.after[name] - self.before[name]

    def _to_itself(self, pattern: Float[Tensor, "batch head key"]) -> Float[Tensor, "batch head 1"]:
        """The last token's attention to itself."""
        return at_last(rearrange(pattern, "b head key -> b key head"), self.prompts)[..., None]


def scale_of(norm: Any, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch 1"]:
    """What a norm divides a state by: what `hook_scale` would show of it.

    It is read off the norm's own output, so that its epsilon is the one it really uses.
    """
    bias = getattr(norm.original_component, "bias", None)
    output = normed(norm, x) if bias is None else normed(norm, x) - bias.detach()
    centred = x if norm.uses_rms_norm else x - x.mean(dim=-1, keepdim=True)
    undivided = centred * gain(norm)
    along = (undivided * output).sum(dim=-1, keepdim=True)
    return undivided.square().sum(dim=-1, keepdim=True) / along


def _reads(model: TransformerBridge, layer: int) -> dict[str, Read]:
    """What both passes show of the blocks that the vector can change."""
    reads: dict[str, Read] = {_final(model): at_last}
    for block in range(layer, model.cfg.n_layers):
        name = f"blocks.{block}"
        reads |= {f"{name}.attn.hook_pattern": from_last, f"{name}.attn.hook_v": at_last}
        if post_norm(model, block) is not None:
            reads |= dict.fromkeys((f"{name}.ln1_post.hook_{x}" for x in ("in", "scale")), at_last)
        if _post_mlp(model, block) is None:
            reads[f"{name}.hook_mlp_out"] = at_last
        else:
            reads |= dict.fromkeys((f"{name}.ln2_post.hook_{x}" for x in ("in", "scale")), at_last)
    return reads


def _observed(
    model: TransformerBridge,
    prompts: Prompts,
    reads: Mapping[str, Read],
    vector: TaskVector | None = None,
) -> dict[str, Tensor]:
    """The readings on one device, at least in float32."""
    found = observe(model, prompts, reads, vector)
    return {name: wide(x).to(device_of(model)) for name, x in found.items()}


def _whole(activation: Tensor, prompts: Prompts) -> Tensor:
    return activation


def _final(model: TransformerBridge) -> str:
    return f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"


def _post_mlp(model: TransformerBridge, layer: int) -> Any | None:
    """The norm between a block's MLP and the residual stream, where the family has one."""
    return getattr(model.blocks[layer], "ln2_post", None)


def _intervals(
    values: Float[np.ndarray, "group query"],
) -> tuple[Float[np.ndarray, " group"], Float[np.ndarray, " group"]]:
    """Intervals of many means, some at a time: each resampling copies all it is given."""
    pairs = [intervals_of_means(values[i : i + ROWS]) for i in range(0, len(values), ROWS)]
    low, high = (np.concatenate(ends) for ends in zip(*pairs, strict=True))
    return low, high
