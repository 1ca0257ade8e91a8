"""What the OV circuits, or the MLPs, make of theta: vectors to put in theta's place.

"Task Vectors, Learned Not Extracted" (ICLR 2026) replaces theta, added at the input of block l, by
the sum of W_O W_V theta over all heads of all blocks from l on (docs/analyses.md). Here are those
vectors, block by block; `analysis.reconstruction` puts them in and scores them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.analysis.circuits import Circuits, frozen, is_parallel, post_norm, pre_norm
from mechtv.analysis.subject import Subject, random_like
from mechtv.errors import InvalidInput
from mechtv.forward.probe import Change, Read, at_last, last_residual, observe
from mechtv.tasks.prompts import Prompts

Reading = Literal["layered", "packed"]
Norm = Literal["frozen", "none"]
Attention = Literal["self", "none"]
Rescale = Literal["none", "theta", "validation"]
MlpState = Literal["seen", "without"]

Rows = dict[str, Tensor]
"""For each hook point what is added there: [query d_model]."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How theta is reconstructed.

    Args:
        reading: `layered` adds each block's vector to that block's own output; `packed` adds their
            sum once, where theta was added.
        norm: `frozen` sends theta through the norm before each block's attention, and the sum
            through the one behind it, where the family has them, with the scales seen on the
            injected run; `none` is the literal formula.
        attention: `self` weights each head with the attention that the last token pays to itself
            on the injected run; `none` is the literal formula.
        rescale: the norm of the vectors' sum is as computed (`none`), theta's own (`theta`), or a
            share of theta's chosen on validation queries (`validation`). Each query has its own
            factor, the same for all blocks.
        mlp_state: h in MLP(h + theta) - MLP(h) is what the MLP's norm reads on the injected run
            (`seen`; theta is in it already), or that minus theta (`without`).

    Raises:
        InvalidInput: for an unknown value.
    """

    reading: Reading = "layered"
    norm: Norm = "frozen"
    attention: Attention = "self"
    rescale: Rescale = "none"
    mlp_state: MlpState = "without"

    def __post_init__(self) -> None:
        kinds = {
            "reading": Reading,
            "norm": Norm,
            "attention": Attention,
            "rescale": Rescale,
            "mlp_state": MlpState,
        }
        for name, kind in kinds.items():
            value = getattr(self, name)
            if value not in get_args(kind):
                allowed = " or ".join(map(repr, get_args(kind)))
                raise InvalidInput(f"{name}={value!r} is unknown; use {allowed}.")


def head_vectors(
    model: TransformerBridge, subject: Subject, prompts: Prompts, settings: Settings
) -> Iterator[tuple[int, Float[Tensor, "query head d_model"]]]:
    """What each head of each block from theta's on makes of theta, for each query, block by block.

    W_O W_V theta, with theta behind the block's frozen norm, and times the head's attention from
    the last token to itself, as `settings` says (docs/analyses.md).
    Biases do not occur: theta is a difference.
    """
    layers = range(subject.layer, model.cfg.n_layers)
    reads: dict[str, Read] = {}
    for layer in layers:
        reads |= _reads(model, layer, settings)
    seen = observe(model, prompts, reads, subject.vector()) if reads else {}
    theta = subject.theta.expand(len(prompts), -1)
    for layer in layers:
        yield layer, _block(model, layer, theta, seen, settings)


def ov_rows(
    model: TransformerBridge, subject: Subject, prompts: Prompts, settings: Settings
) -> Rows:
    """The sum over heads of `head_vectors`, where each block's attention adds to the stream."""
    made = head_vectors(model, subject, prompts, settings)
    return {f"blocks.{layer}.hook_attn_out": each.sum(dim=1) for layer, each in made}


def mlp_rows(
    model: TransformerBridge, subject: Subject, prompts: Prompts, settings: Settings
) -> Rows:
    """MLP(h + theta) - MLP(h) of each block from theta's on, behind its norms, on the injected run.

    Two passes: one keeps what the blocks give; in the other each MLP reads a changed state, and
    behind each block the stream is put back. Empty for a model without MLPs.
    """
    if not has_mlps(model):
        return {}
    layers = range(subject.layer, model.cfg.n_layers)
    sign = 1 if settings.mlp_state == "seen" else -1
    vector, step = subject.vector(), sign * subject.theta
    outputs, others, behind = dict[str, Tensor](), dict[str, Tensor](), dict[str, Tensor]()
    looks, changes = dict[str, Change](), dict[str, Change]()
    # Where attention precedes the MLP, what it gives is read by the MLP, and by it alone.
    entrance = "hook_resid_pre" if is_parallel(model) else "hook_attn_out"
    for layer in layers:
        block = f"blocks.{layer}."
        output, end = block + "hook_mlp_out", block + "hook_resid_post"
        looks |= {
            output: partial(_keep, kept=outputs, name=output),
            end: partial(_keep, kept=behind, name=end),
        }
        changes |= {
            block + entrance: partial(_shift, by=step),
            output: partial(_keep, kept=others, name=output),
            end: partial(_put_back, kept=behind, name=end),
        }
    last_residual(model, prompts, vector, changes=looks)
    last_residual(model, prompts, vector, changes=changes)
    return {name: sign * (others[name] - outputs[name]) for name in outputs}


def has_mlps(model: TransformerBridge) -> bool:
    """Whether the model is more than attention."""
    return model.get_hook_point("blocks.0.hook_mlp_out") is not None


def summed(rows: Mapping[str, Float[Tensor, "query d_model"]]) -> Float[Tensor, "query d_model"]:
    """The packed vector: the sum over blocks."""
    return torch.stack(list(rows.values())).sum(dim=0)


def rescaled(model: TransformerBridge, subject: Subject, rows: Rows, share: float) -> Rows:
    """The rows times one factor a query, so that their sum has `share` of theta's norm.

    Norms are as the model sees them. A sum of zero stays zero.
    """
    norm = subject.as_seen(model, summed(rows)).norm(dim=1, keepdim=True)
    wanted = share * subject.as_seen(model, subject.theta).norm()
    factor = torch.where(norm > 0, wanted / norm.clamp(min=torch.finfo(norm.dtype).tiny), 0.0)
    return {name: row * factor for name, row in rows.items()}


def directions(
    model: TransformerBridge,
    subject: Subject,
    n: int,
    generator: torch.Generator,
    *,
    across: bool,
) -> Float[Tensor, "n d_model"]:
    """Random unit vectors, as the model sees them; with `across`, at right angles to theta."""
    theta = subject.as_seen(model, subject.theta)
    drawn = random_like(theta, n, generator, cosine=0.0 if across else None)
    seen = subject.as_seen(model, drawn)
    unit: Tensor = seen / seen.norm(dim=1, keepdim=True)
    return unit


def null_rows(
    model: TransformerBridge,
    subject: Subject,
    rows: Rows,
    drawn: Float[Tensor, "point d_model"],
    *,
    across: bool,
) -> Rows:
    """Random vectors in the place of a reconstruction's: at each point of each query's norm there.

    With `across` also of its cosine with theta there, and otherwise random. All queries share the
    directions, as they nearly share those of a reconstruction. Under LayerNorm, norm and cosine are
    those of centred vectors, and the nulls are centred.

    Args:
        drawn: one of the `directions` for each point.
    """
    theta = subject.as_seen(model, subject.theta)
    made: Rows = {}
    for (name, row), direction in zip(rows.items(), drawn, strict=True):
        seen = subject.as_seen(model, row)
        norm = seen.norm(dim=1, keepdim=True)
        if across:
            cosine = torch.cosine_similarity(seen, theta.to(seen), dim=1)[:, None]
            sine = (1 - cosine.square()).clamp(min=0).sqrt()
            made[name] = norm * (cosine * theta / theta.norm() + sine * direction)
        else:
            made[name] = norm * direction
    return made


def _reads(model: TransformerBridge, layer: int, settings: Settings) -> dict[str, Read]:
    """What a block's vectors need to know of the injected run."""
    block, reads = f"blocks.{layer}.", dict[str, Read]()
    if settings.attention == "self":
        reads[block + "attn.hook_pattern"] = _to_itself
    if settings.norm == "frozen":
        if pre_norm(model, layer) is not None:
            reads[block + "ln1.hook_scale"] = at_last
        if post_norm(model, layer) is not None:
            reads[block + "ln1_post.hook_scale"] = at_last
    return reads


def _block(
    model: TransformerBridge,
    layer: int,
    theta: Float[Tensor, "query d_model"],
    seen: Mapping[str, Tensor],
    settings: Settings,
) -> Float[Tensor, "query head d_model"]:
    block, before, after = f"blocks.{layer}.", pre_norm(model, layer), post_norm(model, layer)
    if settings.norm == "frozen" and before is not None:
        theta = frozen(before, seen[block + "ln1.hook_scale"], theta)
    made = Circuits.of(model, layer).ov(theta)
    if settings.attention == "self":
        weights = seen[block + "attn.hook_pattern"].to(made)
        made = einsum(made, weights, "query head d, query head -> query head d")
    if settings.norm == "frozen" and after is not None:
        made = frozen(after, seen[block + "ln1_post.hook_scale"][:, None], made)
    return made


def _to_itself(
    pattern: Float[Tensor, "batch head query key"], prompts: Prompts
) -> Float[Tensor, "batch head"]:
    """Each head's attention from the last token to the last token: c_NN."""
    last = prompts.last.to(pattern.device)
    return pattern[torch.arange(len(prompts)), :, last, last]


def _keep(x: Tensor, *, kept: dict[str, Tensor], name: str) -> None:
    kept[name] = x


def _shift(x: Tensor, *, by: Tensor) -> Tensor:
    return x + by


def _put_back(_: Tensor, *, kept: dict[str, Tensor], name: str) -> Tensor:
    return kept[name]
