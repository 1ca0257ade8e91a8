"""Who reads theta: it is kept out of the residual stream, and shown to some of its readers only.

Each reader of the stream at the last token sees h + theta, or h alone: the attention's values, its
queries and keys, the MLPs, the final norm. All readers together are the injected run exactly; none
is the plain run. This asks by intervention what an OV reconstruction asks by adding vectors.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.analysis.answers import Answers, rivals
from mechtv.analysis.circuits import normed
from mechtv.analysis.shapley import coalitions, contributions
from mechtv.analysis.subject import Subject
from mechtv.errors import InvalidInput, UnknownName
from mechtv.evaluation.provenance import UNKNOWN, Provenance
from mechtv.evaluation.seeds import seed_for
from mechtv.forward.memory import steady
from mechtv.forward.probe import Change, last_residual
from mechtv.forward.run import in_batches, kept
from mechtv.forward.unembed import unembedded
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import SplitName, Task
from mechtv.vectors.vector import TaskVector

Reader = Literal["values", "queries and keys", "MLPs", "final norm"]
READERS: tuple[Reader, ...] = get_args(Reader)
SETTINGS = coalitions(READERS)
"""All sets of readers, from none to all."""

LARGEST_ERROR = 0.1  # of the effect, between all readers and the injected run; bfloat16 has 0.02
N_CHECKED = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class Readers:
    """How well queries are answered when only some readers see theta.

    Args:
        task, split, layer: what was scored; theta belongs at the input of block `layer`.
        blocks: the ranges of blocks whose readers were shown theta. The final norm belongs to
            ranges that reach the last block; in others, showing it changes nothing.
        answers: for each range, those of each of `SETTINGS`. Every setting's rivals are those of
            the plain run, so that logit differences can be subtracted.
        queries: the prompts' queries, in order.
        error: how far the last residual states with all readers are from the injected run's,
            relative to theta's effect on them, on the first queries: rounding.
        provenance: model, weights, template and seed.
    """

    task: str
    split: str
    layer: int
    blocks: tuple[range, ...]
    answers: tuple[tuple[Answers, ...], ...]
    queries: tuple[tuple[str, ...], ...] = ()
    error: float = 0.0
    provenance: Provenance = UNKNOWN

    def of(self, *shown: Reader, blocks: range | None = None) -> Answers:
        """The answers when these readers see theta, in one of the ranges (the first if None).

        Raises:
            UnknownName: for an unknown reader.
            InvalidInput: for a range that was not measured.
        """
        for name in shown:
            if name not in READERS:
                raise UnknownName("reader", name, READERS)
        if blocks is not None and blocks not in self.blocks:
            raise InvalidInput(
                f"blocks={blocks} were not measured; use one of {', '.join(map(str, self.blocks))}."
            )
        place = 0 if blocks is None else self.blocks.index(blocks)
        return self.answers[place][_place(shown)]

    def table(self) -> pd.DataFrame:
        """One row a (range of blocks, setting, score): value, 95 % interval, n."""
        return pd.DataFrame(
            self._about(blocks)
            | {"readers": " + ".join(shown) or "none", "n_readers": len(shown)}
            | {"score": score, "value": e.value, "low": e.low, "high": e.high, "n": e.n}
            | self.provenance.columns()
            for blocks, settings in zip(self.blocks, self.answers, strict=True)
            for shown, answers in zip(SETTINGS, settings, strict=True)
            for score, e in answers.estimates().items()
        )

    def effects(self, score: str = "log-probability") -> pd.DataFrame:
        """What each reader, and each pair, contributes to a score.

        Readers are the players of a game whose value is the mean score; see
        `mechtv.analysis.shapley` for `alone`, `withheld`, the `Shapley value` and the
        `Shapley interaction`.

        Args:
            score: `log-probability`, `logit difference`, or one of the accuracies.

        Returns:
            One row a (range of blocks, effect): in the score's unit, and as a share of the gain,
            both with 95 % intervals by bootstrap over queries. A gain of 0 has no shares; if its
            interval contains 0 they have no intervals (NaN).

        Raises:
            UnknownName: if there is no such score.
        """
        parts = []
        for blocks, settings in zip(self.blocks, self.answers, strict=True):
            values = np.stack([answers.values(score).astype(float) for answers in settings])
            found = contributions(READERS, values).rename(columns={"player": "reader"})
            about = self._about(blocks) | {"score": score}
            columns = found.to_dict("list") | self.provenance.columns()
            parts.append(pd.DataFrame(about | columns))
        return pd.concat(parts, ignore_index=True)

    def _about(self, blocks: range) -> dict[str, Any]:
        where = f"{blocks[0]}-{blocks[-1]}" if len(blocks) > 1 else str(blocks[0])
        return {"task": self.task, "split": self.split, "layer": self.layer, "blocks": where}


def readers(
    model: TransformerBridge,
    task: Task,
    vector: TaskVector,
    *,
    blocks: range | Sequence[range] | None = None,
    n: int | None = None,
    split: SplitName = "test",
    seed: int | None = None,
    progress: bool | None = None,
) -> Readers:
    """Score all 16 ways to show theta to some of the stream's readers (docs/analyses.md).

    Args:
        vector: one value added to the residual stream at the last token, at block l.
        blocks: where readers are shown theta: a range of blocks, such as `range(8, 16)`, or several
            ranges, each by itself; elsewhere it is hidden. All blocks from l on if None.
        n: how many queries; the whole split if None.
        seed: fixes the splits; the vector's own if None.

    Raises:
        InvalidInput: if the vector is not of that form, a range is not within the blocks from l on,
            or this model's blocks read the stream in yet another way.
    """
    subject, seed = Subject.of(model, vector), seed_for(vector) if seed is None else seed
    ranges = _checked_ranges(model, subject.layer, blocks)
    prompts = Prompts.of(model, task, split=split, n=n, seed=seed)
    with torch.no_grad(), steady(model), kept(model, prompts, subject.vector(), show=progress):
        error = _check_identity(model, prompts, subject)
        columns = in_batches(
            prompts,
            lambda batch: _columns(model, batch, subject, ranges),
            title=f"readers of theta, {task.name}",
            show=progress,
        )
    found = rearrange(columns, "query range setting score -> range setting query score")
    return Readers(
        task=task.name,
        split=split,
        layer=subject.layer,
        blocks=ranges,
        answers=tuple(
            tuple(Answers.of_columns(each, closed=bool(prompts.labels)) for each in settings)
            for settings in found
        ),
        queries=tuple(example.key for example in prompts.examples),
        error=error,
        provenance=Provenance.of(model, task, seed),
    )


def _columns(
    model: TransformerBridge,
    prompts: Prompts,
    subject: Subject,
    ranges: Sequence[range],
) -> Float[Tensor, "batch range setting score"]:
    """Hit, label hit, log-probability, logit difference of each setting."""
    plain = _residual(model, prompts, subject, ranges[0], ())  # the same for all ranges
    against = rivals(unembedded(model, plain[None])[0], prompts)
    rows = []
    for blocks in ranges:
        reaches_end = blocks[-1] == model.cfg.n_layers - 1
        states: dict[frozenset[Reader], Tensor] = {frozenset(): plain}
        for shown in SETTINGS:
            inside = frozenset(shown) - {"final norm"}
            if inside not in states:  # the final norm changes nothing before it
                states[inside] = _residual(model, prompts, subject, blocks, inside)
            state = states[inside]
            seen = _moved(state, subject) if reaches_end and "final norm" in shown else state
            answers = Answers.of(unembedded(model, seen[None])[0], prompts, against)
            rows.append(answers.columns())
    return rearrange(
        torch.stack(rows), "(range setting) b score -> b range setting score", range=len(ranges)
    )


def _residual(
    model: TransformerBridge,
    prompts: Prompts,
    subject: Subject,
    blocks: range,
    shown: Collection[Reader],
) -> Float[Tensor, "batch d_model"]:
    """The stream behind the last block, never with theta in it, when some readers saw theta."""
    first = f"blocks.{subject.layer}.hook_resid_pre"
    changes: dict[str, Change] = {first: lambda _: None}  # so that no pass begins before block l
    for layer in blocks:
        changes |= _changes(model.blocks[layer], f"blocks.{layer}.", subject, shown)
    return last_residual(model, prompts, changes=changes)


def _changes(
    block: Any, name: str, subject: Subject, shown: Collection[Reader]
) -> dict[str, Change]:
    """What the readers in one block see instead; the norms' inputs are only looked at."""
    seen: dict[str, Tensor] = {}

    def look(norm: str) -> Change:
        def change(state: Float[Tensor, "batch d_model"]) -> None:
            seen[norm] = normed(getattr(block, norm), _moved(state, subject))

        return change

    def give(norm: str) -> Change:
        return lambda _: seen[norm]

    # Some parallel blocks have one norm for both; some families' sublayers read the stream itself.
    own = "ln2" if hasattr(block, "ln2") else "ln1"
    places: dict[str, tuple[str, tuple[str, ...]]] = {
        "values": ("ln1", ("attn.v",)),
        "queries and keys": ("ln1", ("attn.q", "attn.k")),
        "MLPs": (own, ("mlp",)),
    }
    changes: dict[str, Change] = {}
    for norm, modules in map(places.__getitem__, shown):
        has_norm = hasattr(block, norm)
        if has_norm:
            changes[f"{name}{norm}.hook_in"] = look(norm)
        reading = give(norm) if has_norm else partial(_moved, subject=subject)
        changes |= {f"{name}{module}.hook_in": reading for module in modules}
    return changes


def _moved(
    state: Float[Tensor, "batch d_model"], subject: Subject
) -> Float[Tensor, "batch d_model"]:
    seen: Tensor = state + subject.theta.to(state.device)
    return seen.to(state.dtype)


def _check_identity(model: TransformerBridge, prompts: Prompts, subject: Subject) -> float:
    """The relative error of all readers together, on a few prompts."""
    few = prompts.select(range(min(N_CHECKED, len(prompts))))
    everywhere = range(subject.layer, model.cfg.n_layers)
    plain = _residual(model, few, subject, everywhere, ())
    together = _moved(_residual(model, few, subject, everywhere, READERS[:-1]), subject)
    injected = last_residual(model, few, subject.vector())
    effect = float((injected - plain).norm())
    error = float((together - injected).norm()) / effect if effect else 0.0
    if error > LARGEST_ERROR:
        raise InvalidInput(
            "This model's blocks have other readers of the residual stream than attention and MLP "
            f"behind their norms: together these miss the injected run by {error:.0%} of theta's "
            "effect; use another model, or float32 if its weights are of a shorter type."
        )
    return error


def _checked_ranges(
    model: TransformerBridge, layer: int, blocks: range | Sequence[range] | None
) -> tuple[range, ...]:
    everywhere = range(layer, model.cfg.n_layers)
    if blocks is None:
        return (everywhere,)
    ranges: tuple[Any, ...] = tuple(blocks) if isinstance(blocks, (list, tuple)) else (blocks,)
    if (
        not ranges
        or len(set(ranges)) < len(ranges)
        or not all(isinstance(r, range) and r.step == 1 and r for r in ranges)
        or not all(r[0] in everywhere and r[-1] in everywhere for r in ranges)
    ):
        raise InvalidInput(
            f"blocks={blocks!r} are no ranges of blocks that can see theta; use one or several "
            f"distinct ones within {everywhere}, such as {everywhere}."
        )
    return ranges


def _place(shown: Collection[str]) -> int:
    """The number of a setting."""
    return SETTINGS.index(tuple(name for name in READERS if name in shown))
