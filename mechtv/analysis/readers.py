"""Who reads theta: it is kept out of the residual stream, and shown to some of its readers only.

Each reader of the stream at the last token sees h + theta, or h alone: the attention's values, its
queries and keys, the MLPs, the final norm. All readers together are the injected run exactly; none
is the plain run. This asks by intervention what an OV reconstruction asks by adding vectors.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.analysis.answers import Answers, fixed_rivals
from mechtv.analysis.circuits import normed
from mechtv.analysis.subject import Subject
from mechtv.errors import InvalidInput, UnknownName
from mechtv.evaluation.intervals import LEVEL, RESAMPLES, intervals_of_means
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
SETTINGS: tuple[tuple[Reader, ...], ...] = tuple(
    some for size in range(len(READERS) + 1) for some in combinations(READERS, size)
)
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

        With v the mean score of a set of readers, N all of them: `alone` is v(i) - v(none),
        `withheld` v(N) - v(N without i). The `Shapley value` is the mean, over all orders in which
        the readers may be let in, of what i adds (Shapley 1953); the values sum to the gain
        v(N) - v(none). The `Shapley interaction` of i and j is v(S+i+j) - v(S+i) - v(S+j) + v(S),
        averaged over sets S of others with weights |S|! (|N|-|S|-2)! / (|N|-1)! (Grabisch and
        Roubens 1999): above 0 they need each other, below 0 either can stand in for the other.

        Args:
            score: `log-probability`, `logit difference`, or one of the accuracies.

        Returns:
            One row a (range of blocks, effect): in the score's unit, and as a share of the gain,
            both with 95 % intervals by bootstrap over queries. A gain of 0 has no shares; if its
            interval contains 0 they have no intervals (NaN).

        Raises:
            UnknownName: if there is no such score.
        """
        weights = np.stack(list(EFFECTS.values()))
        names = {
            "score": score,
            "effect": [kind for kind, *_ in EFFECTS],
            "reader": [who for _, who, *_ in EFFECTS],
            "with": ["".join(other) for _, _, *other in EFFECTS],
        }
        parts = []
        for blocks, settings in zip(self.blocks, self.answers, strict=True):
            values = np.stack([_values(answers, score) for answers in settings])
            found = _with_shares(weights @ values, values[-1] - values[0])
            numbers = found | {"n": values.shape[1]} | self.provenance.columns()
            parts.append(pd.DataFrame(self._about(blocks) | names | numbers))
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
    """Score all 16 ways to show theta to some of the stream's readers (METHODS, section 3).

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
        rivals_of = fixed_rivals(model, prompts)
        columns = in_batches(
            prompts,
            lambda batch: _columns(model, batch, subject, ranges, rivals_of(batch)),
            title=f"readers of theta, {task.name}",
            show=progress,
        )
    found = rearrange(columns, "query range setting score -> range setting score query").numpy()
    return Readers(
        task=task.name,
        split=split,
        layer=subject.layer,
        blocks=ranges,
        answers=tuple(
            tuple(_answers(setting, closed=bool(prompts.labels)) for setting in settings)
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
    against: Int[Tensor, "batch rival"],
) -> Float[Tensor, "batch range setting score"]:
    """Hit, label hit, log-probability, logit difference of each setting."""
    rows = []
    for blocks in ranges:
        reaches_end = blocks[-1] == model.cfg.n_layers - 1
        states: dict[frozenset[Reader], Tensor] = {}
        for shown in SETTINGS:
            inside = frozenset(shown) - {"final norm"}
            if inside not in states:  # the final norm changes nothing before it
                states[inside] = _residual(model, prompts, subject, blocks, inside)
            state = states[inside]
            seen = _moved(state, subject) if reaches_end and "final norm" in shown else state
            answers = Answers.of(unembedded(model, seen[None])[0], prompts, against)
            rows.append(torch.from_numpy(_as_columns(answers)))
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

    own = "ln2" if hasattr(block, "ln2") else "ln1"  # some parallel blocks have one norm for both
    places: dict[str, tuple[str, tuple[str, ...]]] = {
        "values": ("ln1", ("attn.v",)),
        "queries and keys": ("ln1", ("attn.q", "attn.k")),
        "MLPs": (own, ("mlp",)),
    }
    changes: dict[str, Change] = {}
    for norm, modules in map(places.__getitem__, shown):
        changes[f"{name}{norm}.hook_in"] = look(norm)
        changes |= {f"{name}{module}.hook_in": give(norm) for module in modules}
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


# --- scores as columns of a tensor, and back ------------------------------------------------------


def _as_columns(answers: Answers) -> Float[np.ndarray, "query score"]:
    label = answers.correct if answers.correct_label is None else answers.correct_label
    scores = (answers.correct, label, answers.log_probability, answers.logit_difference)
    return np.stack([score.astype(float) for score in scores], axis=1)


def _answers(columns: Float[np.ndarray, "score query"], closed: bool) -> Answers:
    correct, label, log_probability, logit_difference = columns
    return Answers(
        correct=correct.astype(bool),
        correct_label=label.astype(bool) if closed else None,
        log_probability=log_probability,
        logit_difference=logit_difference,
    )


def _values(answers: Answers, score: str) -> Float[np.ndarray, " query"]:
    known = {
        "log-probability": answers.log_probability,
        "logit difference": answers.logit_difference,
        "accuracy, full vocabulary": answers.correct,
        "accuracy, label-restricted": answers.correct_label,
    }
    found = known.get(score)
    if found is None:
        raise UnknownName("score", score, [name for name, x in known.items() if x is not None])
    return found.astype(float)


# --- the readers as players of a game ------------------------------------------------------------


def _place(shown: Collection[str]) -> int:
    """The number of a setting."""
    return SETTINGS.index(tuple(name for name in READERS if name in shown))


def _difference(
    who: Sequence[Reader], weight: Callable[[int], float]
) -> Float[np.ndarray, " setting"]:
    """What adding one reader changes (of two: their second difference), as weights of settings.

    Args:
        weight: of a set of others, by its size.
    """
    row = np.zeros(len(SETTINGS))
    for rest in SETTINGS:
        if set(rest).isdisjoint(who):
            for size in range(len(who) + 1):
                for some in combinations(who, size):
                    row[_place([*rest, *some])] += (-1) ** (len(who) - size) * weight(len(rest))
    return row


def _shapley_weight(size: int, together: int) -> float:
    """|S|! (|N| - |S| - t)! / (|N| - t + 1)! for t readers together."""
    n = len(READERS)
    return (
        math.factorial(size)
        * math.factorial(n - size - together)
        / math.factorial(n - together + 1)
    )


def _effects() -> Iterator[tuple[tuple[str, ...], Float[np.ndarray, " setting"]]]:
    for one in READERS:
        yield ("alone", one), _difference([one], lambda size: float(size == 0))
        yield ("withheld", one), _difference([one], lambda size: float(size == len(READERS) - 1))
        yield ("Shapley value", one), _difference([one], lambda size: _shapley_weight(size, 1))
    for pair in combinations(READERS, 2):
        yield ("Shapley interaction", *pair), _difference(pair, lambda s: _shapley_weight(s, 2))


EFFECTS = dict(_effects())
"""Each effect and whose it is, as weights of `SETTINGS`."""


def _with_shares(
    effects: Float[np.ndarray, "effect query"], gain: Float[np.ndarray, " query"]
) -> dict[str, Any]:
    """Each effect's mean over queries and its share of the mean gain, as columns of a table."""
    n, mean, total = len(gain), effects.mean(axis=1), gain.mean()
    low, high = intervals_of_means(effects)
    least, most = intervals_of_means(gain)
    share = mean / total if total else np.full(len(mean), np.nan)
    ends = np.full((2, len(mean)), np.nan)
    if least > 0 or most < 0:
        drawn = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=RESAMPLES) / n
        with np.errstate(divide="ignore", invalid="ignore"):  # a few resamples may have no gain
            ratios = (effects @ drawn.T) / (gain @ drawn.T)
        quantiles = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
        ends = np.nanquantile(ratios, quantiles, axis=1, method="nearest")
    means = {"value": mean, "low": low, "high": high}
    return means | {"share": share, "share_low": ends[0], "share_high": ends[1]}
