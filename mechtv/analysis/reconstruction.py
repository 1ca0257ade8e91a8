"""How far the OV circuits' vectors, or the MLPs', do what theta does, beside random vectors.

"Task Vectors, Learned Not Extracted" (ICLR 2026), OV reconstruction; docs/analyses.md.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.analysis import ov
from mechtv.analysis.answers import Answers, rivals
from mechtv.analysis.ov import Rows, Settings
from mechtv.analysis.reconstructed import (
    BOTH,
    FULL,
    MLP,
    OV,
    ZERO,
    Outcome,
    Reconstruction,
    ReconstructionByLayer,
)
from mechtv.analysis.subject import Subject
from mechtv.errors import InvalidInput
from mechtv.evaluation.provenance import Provenance
from mechtv.evaluation.seeds import common_seed, seed_for
from mechtv.forward.memory import steady
from mechtv.forward.probe import Change, last_residual
from mechtv.forward.run import in_batches, kept
from mechtv.forward.unembed import unembedded
from mechtv.seeds import torch_rng
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import SplitName, Task
from mechtv.vectors.vector import TaskVector

NULLS = {"norm": False, "norm and cosine": True}  # whether at theta's angle
SHARES = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
"""The norms, in theta's, among which `rescale="validation"` chooses."""


def reconstruct_ov(
    model: TransformerBridge,
    task: Task,
    vector: TaskVector,
    *,
    reading: ov.Reading = "layered",
    norm: ov.Norm = "frozen",
    attention: ov.Attention = "self",
    rescale: ov.Rescale = "none",
    mlp_state: ov.MlpState = "without",
    n_null: int = 10,
    n: int | None = None,
    split: SplitName = "test",
    seed: int | None = None,
    progress: bool | None = None,
) -> Reconstruction:
    """Put in theta's place what the OV circuits, or the MLPs, make of it, and score the answers.

    In place of theta, added at the input of block l at the last token, comes the sum of W_O W_V
    theta over all heads of the blocks from l on; as a control, MLP(h + theta) - MLP(h); and random
    vectors of the same norms, and of the same norms and cosines with theta ("Learned", OV
    reconstruction; docs/analyses.md). `reading="packed", norm="none", attention="none"` is the
    paper's literal formula.

    Args:
        vector: adds one value at the input of one block, at the last prompt token.
        reading, norm, attention, rescale, mlp_state: see `mechtv.analysis.ov.Settings`.
        n_null: random draws of each kind of null.
        n: how many queries, also of those for `rescale="validation"`; all of the split if None.
        seed: of the splits and the nulls; the vector's own if None.

    Raises:
        InvalidInput: for an unknown setting, a negative `n_null`, a vector of another form, or if
            the factor would be chosen on the queries that are scored.
    """
    settings = Settings(
        reading=reading, norm=norm, attention=attention, rescale=rescale, mlp_state=mlp_state
    )
    if n_null < 0:
        raise InvalidInput(f"n_null={n_null} is negative; use 10 or more, or 0 for no nulls.")
    if rescale == "validation" and split == "validation":
        raise InvalidInput(
            "rescale='validation' chooses a factor on the validation queries, so they cannot be "
            "scored with it; use split='test'."
        )
    seed = seed_for(vector) if seed is None else seed
    subject = Subject.of(model, vector)
    prompts = Prompts.of(model, task, split=split, n=n, seed=seed)
    with torch.no_grad(), steady(model):
        shares = dict.fromkeys(_parts(model), 1.0) if rescale == "theta" else {}
        if rescale == "validation":
            chosen_on = Prompts.of(model, task, split="validation", n=n, seed=seed)
            shares = _best_shares(model, subject, chosen_on, settings, progress)
        drawn = _drawn(model, subject, settings, n_null, seed)
        make = partial(_settings, model, subject, settings=settings, shares=shares, drawn=drawn)
        title = f"reconstruction at layer {subject.layer}, {task.name}"
        scores = _passes(model, subject, prompts, make, title, progress).unbind(dim=1)
    outcomes = [_outcome(each, closed=bool(prompts.labels)) for each in scores]
    names = [ZERO, FULL, *_parts(model)]
    random = iter(outcomes[len(names) :])
    return Reconstruction(
        task=task.name,
        layer=subject.layer,
        split=split,
        settings=settings,
        outcomes=dict(zip(names, outcomes, strict=False)),
        nulls={key: tuple(next(random) for _ in each) for key, each in drawn.items()},
        shares=shares,
        provenance=Provenance.of(model, task, seed),
    )


def reconstruct_by_layer(
    model: TransformerBridge,
    task: Task,
    vectors: Sequence[TaskVector],
    *,
    seed: int | None = None,
    **options: Any,
) -> ReconstructionByLayer:
    """`reconstruct_ov` for vectors of several layers, all on the same queries (protocol L4).

    Args:
        vectors: each of another layer.
        seed: of the splits and the nulls; the vectors' own if None.
        options: as `reconstruct_ov` takes them.

    Raises:
        InvalidInput: for no vectors, two of one layer, vectors of several seeds, or what
            `reconstruct_ov` refuses.
    """
    layers = [Subject.of(model, vector).layer for vector in vectors]
    if not layers or len(set(layers)) < len(layers):
        raise InvalidInput(
            f"The vectors are added at layers {layers}; give one or more, each of another layer."
        )
    seed = common_seed(vectors) if seed is None else seed
    found = [reconstruct_ov(model, task, vector, seed=seed, **options) for vector in vectors]
    return ReconstructionByLayer(layers=tuple(sorted(found, key=lambda one: one.layer)))


Make = Callable[[Prompts], Iterator[Rows]]
"""Gives one after another, so that no more than one null is held."""


def _parts(model: TransformerBridge) -> tuple[str, ...]:
    return (OV, MLP, BOTH) if ov.has_mlps(model) else (OV,)


def _made(
    model: TransformerBridge, subject: Subject, prompts: Prompts, settings: Settings
) -> dict[str, Rows]:
    """Each part's vectors, block by block, as computed."""
    attention = ov.ov_rows(model, subject, prompts, settings)
    mlps = ov.mlp_rows(model, subject, prompts, settings)
    return dict(zip(_parts(model), (attention, mlps, attention | mlps), strict=False))


def _placed(
    model: TransformerBridge, subject: Subject, rows: Rows, settings: Settings, share: float | None
) -> Rows:
    """A part's vectors as they are added: rescaled, and packed."""
    rows = rows if share is None else ov.rescaled(model, subject, rows, share)
    return {_entry(subject): ov.summed(rows)} if settings.reading == "packed" else rows


def _settings(
    model: TransformerBridge,
    subject: Subject,
    prompts: Prompts,
    *,
    settings: Settings,
    shares: Mapping[str, float],
    drawn: Mapping[tuple[str, str], Float[Tensor, "draw point d_model"]],
) -> Iterator[Rows]:
    """All that is put in theta's place in turn: nothing, theta, each part, each null."""
    parts = {
        part: _placed(model, subject, rows, settings, shares.get(part))
        for part, rows in _made(model, subject, prompts, settings).items()
    }
    theta: Rows = {_entry(subject): subject.theta.expand(len(prompts), -1)}
    yield from ({}, theta, *parts.values())
    for (part, kind), each in drawn.items():
        for one in each:
            yield ov.null_rows(model, subject, parts[part], one, across=NULLS[kind])


def _drawn(
    model: TransformerBridge, subject: Subject, settings: Settings, n_null: int, seed: int
) -> dict[tuple[str, str], Float[Tensor, "draw point d_model"]]:
    """The random directions of each null: one for each point at which the part is added."""
    points = 1 if settings.reading == "packed" else model.cfg.n_layers - subject.layer
    found = {}
    for part in _parts(model)[:2] if n_null else ():
        for kind, across in NULLS.items():
            generator = torch_rng(seed, f"null of {part}, same {kind}")
            each = ov.directions(model, subject, n_null * points, generator, across=across)
            found[part, kind] = rearrange(each, "(draw point) d -> draw point d", point=points)
    return found


def _best_shares(
    model: TransformerBridge,
    subject: Subject,
    prompts: Prompts,
    settings: Settings,
    show: bool | None,
) -> dict[str, float]:
    """For each part the norm of its sum, in theta's, that makes the answers most probable."""

    def make(batch: Prompts) -> Iterator[Rows]:
        for rows in _made(model, subject, batch, settings).values():
            for share in SHARES:
                yield _placed(model, subject, rows, settings, share)

    scores = _passes(model, subject, prompts, make, "factors on validation queries", show)
    log_p = rearrange(scores[..., 2].mean(dim=0), "(part s) -> part s", s=len(SHARES))
    return {part: SHARES[int(one.argmax())] for part, one in zip(_parts(model), log_p, strict=True)}


def _passes(
    model: TransformerBridge,
    subject: Subject,
    prompts: Prompts,
    make: Make,
    title: str,
    show: bool | None,
) -> Float[Tensor, "query passed score"]:
    """The scores of each query under everything that `make` puts in theta's place."""

    def compute(batch: Prompts) -> Float[Tensor, "batch passed score"]:
        with kept(model, batch, subject.vector()):
            plain = unembedded(model, _states(model, subject, batch, {})[None])[0]
            against = rivals(plain, batch)
            every = [_scores(model, subject, batch, rows, against) for rows in make(batch)]
        return torch.stack(every, dim=1)

    return in_batches(prompts, compute, title=title, show=show)


def _states(
    model: TransformerBridge, subject: Subject, prompts: Prompts, rows: Rows
) -> Float[Tensor, "query d_model"]:
    """The residual stream behind the last block, with `rows` in theta's place."""
    changes: dict[str, Change] = {_entry(subject): lambda _: None}  # so that all begin there
    changes |= {name: partial(torch.add, row) for name, row in rows.items()}
    return last_residual(model, prompts, changes=changes)


def _scores(
    model: TransformerBridge,
    subject: Subject,
    prompts: Prompts,
    rows: Rows,
    against: Int[Tensor, "query rival"],
) -> Float[Tensor, "query score"]:
    """The columns of `Answers`, cosine with theta, and norm."""
    states = _states(model, subject, prompts, rows)
    answers = Answers.of(unembedded(model, states[None])[0], prompts, against)
    cosine = norm = torch.full((len(prompts),), torch.nan)
    if rows:
        total = subject.as_seen(model, ov.summed(rows)).double()
        theta = subject.as_seen(model, subject.theta).to(total)
        cosine = torch.cosine_similarity(total, theta, dim=1)
        norm = total.norm(dim=1) / theta.norm()
    return torch.cat([answers.columns(), torch.stack([cosine, norm], dim=1).cpu().double()], dim=1)


def _outcome(scores: Float[Tensor, "query score"], *, closed: bool) -> Outcome:
    answers = Answers.of_columns(scores[:, :-2], closed=closed)
    cosine, norm = scores[:, -2:].numpy().T
    return Outcome(answers=answers, cosine=cosine, norm=norm)


def _entry(subject: Subject) -> str:
    return f"blocks.{subject.layer}.hook_resid_pre"
