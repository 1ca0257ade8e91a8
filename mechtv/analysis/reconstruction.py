"""How far the OV circuits' vectors, or the MLPs', do what theta does, beside random vectors.

"Task Vectors, Learned Not Extracted" (ICLR 2026), OV reconstruction; METHODS, section 3.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.analysis import ov
from mechtv.analysis.answers import Answers, rivals
from mechtv.analysis.ov import Rows, Settings
from mechtv.analysis.subject import Subject
from mechtv.errors import InvalidInput
from mechtv.evaluation.intervals import RESAMPLES, Estimate, mean, mean_share
from mechtv.evaluation.provenance import UNKNOWN, Provenance
from mechtv.evaluation.seeds import common_seed, seed_for
from mechtv.forward.memory import steady
from mechtv.forward.probe import Change, last_residual
from mechtv.forward.run import in_batches, kept
from mechtv.forward.unembed import unembedded
from mechtv.seeds import torch_rng
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import SplitName, Task
from mechtv.vectors.vector import TaskVector

ZERO, FULL, OV, MLP, BOTH = "zero-shot", "theta", "OV", "MLP", "OV + MLP"
NULLS = {"norm": False, "norm and cosine": True}  # whether at theta's angle
RECOVERED = "share of the gain recovered"
SHARES = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
"""The norms, in theta's, among which `rescale="validation"` chooses."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What something in theta's place does to each query.

    Args:
        cosine, norm: of the sum of what is added: its cosine with theta, its norm over theta's,
            both as the model sees them (centred under LayerNorm).
    """

    answers: Answers
    cosine: Float[np.ndarray, " query"]
    norm: Float[np.ndarray, " query"]

    def scores(self) -> dict[str, np.ndarray]:
        """Each score by name, query by query."""
        found: dict[str, np.ndarray] = {"accuracy, full vocabulary": self.answers.correct}
        if self.answers.correct_label is not None:
            found["accuracy, label-restricted"] = self.answers.correct_label
        found["log-probability"] = self.answers.log_probability
        found["logit difference"] = self.answers.logit_difference
        if not np.isnan(self.cosine).any():
            found |= {"cosine with theta": self.cosine, "norm, of theta's": self.norm}
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Reconstruction:
    """One vector, what was put in its place, and what came of it.

    Args:
        outcomes: whose logit differences are all against the rivals of the zero-shot run: of
            `zero-shot` (nothing in theta's place), `theta`, `OV`, and, where the model has
            MLPs, `MLP` and `OV + MLP`.
        nulls: for `OV` and `MLP` and each kind of null (a random vector of the same `norm`, or of
            the same `norm and cosine` with theta), the outcome of each draw.
        shares: the norm of each reconstruction's sum in theta's, where that was set.
    """

    task: str
    layer: int
    split: str
    settings: Settings
    outcomes: Mapping[str, Outcome]
    nulls: Mapping[tuple[str, str], tuple[Outcome, ...]]
    shares: Mapping[str, float]
    provenance: Provenance = UNKNOWN

    def recovered(self, part: str, null: str = "") -> Estimate:
        """The share of theta's gain in log-probability: (part - zero-shot) / (theta - zero-shot).

        With the paired bootstrap interval over queries (2,000 resamples, fixed seed); of a null,
        the mean of its draws. It is unknown (NaN) where theta gains nothing, and so is its interval
        where that of theta's gain reaches down to 0.
        """
        draws = self._draws(part, null)
        return self._share(np.stack([draw.answers.log_probability for draw in draws]))

    def table(self) -> pd.DataFrame:
        """One row a part, null and score: value, 95 % interval over queries, n.

        Of nulls the value is the mean over their `draws`; `lowest` and `highest` are the extreme
        draws' own values.
        """
        about = {"task": self.task, "layer": self.layer, "split": self.split}
        s = self.settings
        how = {"reading": s.reading, "norm": s.norm, "attention": s.attention, "rescale": s.rescale}
        keys = [(part, "") for part in self.outcomes] + list(self.nulls)
        return pd.DataFrame(
            about
            | {"part": part, "null": null}
            | row
            | how
            | {"mlp_state": s.mlp_state, "share": self.shares.get(part)}
            | self.provenance.columns()
            for part, null in keys
            for row in self._rows(part, null)
        )

    def _draws(self, part: str, null: str) -> tuple[Outcome, ...]:
        found = self.nulls.get((part, null)) if null else (self.outcomes.get(part),)
        if not found or found[0] is None:
            known = [*self.outcomes, *(f"{p} with null {kind!r}" for p, kind in self.nulls)]
            raise InvalidInput(
                f"There is no {part!r}{f' with null {null!r}' if null else ''} in this "
                f"reconstruction; it has {', '.join(known)}."
            )
        return tuple(one for one in found if one is not None)

    def _rows(self, part: str, null: str) -> list[dict[str, object]]:
        draws = self._draws(part, null)
        each = [draw.scores() for draw in draws]
        rows = []
        for score in each[0]:
            values = np.stack([scores[score] for scores in each])
            is_share = values.dtype == np.bool_
            found = mean_share(values.T) if is_share else mean(values.mean(axis=0))
            rows.append(_row(score, found, values.mean(axis=1)))
        log_p = np.stack([draw.answers.log_probability for draw in draws])
        alone = np.array([_gained(one, self._gain) for one in log_p - self._base])
        return [*rows, _row(RECOVERED, self._share(log_p), alone)]

    @property
    def _base(self) -> Float[np.ndarray, " query"]:
        return self.outcomes[ZERO].answers.log_probability

    @property
    def _gain(self) -> Float[np.ndarray, " query"]:
        gain: Float[np.ndarray, " query"] = self.outcomes[FULL].answers.log_probability - self._base
        return gain

    def _share(self, log_p: Float[np.ndarray, "draw query"]) -> Estimate:
        part, whole = log_p.mean(axis=0) - self._base, self._gain
        value, low, high = _gained(part, whole), np.nan, np.nan
        if mean(whole).low > 0:
            rng = np.random.default_rng(0)
            drawn = rng.integers(len(whole), size=(RESAMPLES, len(whole)))
            ratios = part[drawn].mean(axis=1) / whole[drawn].mean(axis=1)
            low, high = np.quantile(ratios, (0.025, 0.975))
        return Estimate(value=value, low=float(low), high=float(high), n=len(whole))


@dataclass(frozen=True, kw_only=True, eq=False)
class ReconstructionByLayer:
    """The reconstructions of vectors of several layers, in rising order (protocol L4)."""

    layers: tuple[Reconstruction, ...]

    def table(self) -> pd.DataFrame:
        """The tables of all layers in one."""
        return pd.concat([one.table() for one in self.layers], ignore_index=True)


def _gained(part: Float[np.ndarray, " query"], whole: Float[np.ndarray, " query"]) -> float:
    gain = float(whole.mean())
    return float(part.mean()) / gain if gain > 0 else float("nan")


def _row(score: str, found: Estimate, draws: Float[np.ndarray, " draw"]) -> dict[str, object]:
    numbers = {"value": found.value, "low": found.low, "high": found.high, "n": found.n}
    spread = {"draws": len(draws), "lowest": draws.min(), "highest": draws.max()}
    return {"score": score} | numbers | spread


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
    reconstruction; METHODS, section 3). `reading="packed", norm="none", attention="none"` is the
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


Make = Callable[[Prompts], list[Rows]]


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
) -> list[Rows]:
    """All that is put in theta's place in turn: nothing, theta, each part, each null."""
    parts = {
        part: _placed(model, subject, rows, settings, shares.get(part))
        for part, rows in _made(model, subject, prompts, settings).items()
    }
    theta: Rows = {_entry(subject): subject.theta.expand(len(prompts), -1)}
    nulls = [
        ov.null_rows(model, subject, parts[part], one, across=NULLS[kind])
        for (part, kind), each in drawn.items()
        for one in each
    ]
    return [{}, theta, *parts.values(), *nulls]


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

    def make(batch: Prompts) -> list[Rows]:
        made = _made(model, subject, batch, settings)
        return [
            _placed(model, subject, rows, settings, share)
            for rows in made.values()
            for share in SHARES
        ]

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
    """Answers' four scores (the second NaN for open answers), cosine with theta, and norm."""
    states = _states(model, subject, prompts, rows)
    a = Answers.of(unembedded(model, states[None])[0], prompts, against)
    label = np.full(len(prompts), np.nan) if a.correct_label is None else a.correct_label
    cosine = norm = torch.full((len(prompts),), torch.nan)
    if rows:
        total = subject.as_seen(model, ov.summed(rows)).double()
        theta = subject.as_seen(model, subject.theta).to(total)
        cosine = torch.cosine_similarity(total, theta, dim=1)
        norm = total.norm(dim=1) / theta.norm()
    of_answers = [a.correct, label, a.log_probability, a.logit_difference]
    columns = [*of_answers, cosine.cpu().numpy(), norm.cpu().numpy()]
    return torch.from_numpy(np.stack(columns, axis=1).astype(float))


def _outcome(scores: Float[Tensor, "query score"], *, closed: bool) -> Outcome:
    correct, label, log_p, difference, cosine, norm = scores.numpy().T
    answers = Answers(
        correct=correct.astype(bool),
        correct_label=label.astype(bool) if closed else None,
        log_probability=log_p,
        logit_difference=difference,
    )
    return Outcome(answers=answers, cosine=cosine, norm=norm)


def _entry(subject: Subject) -> str:
    return f"blocks.{subject.layer}.hook_resid_pre"
