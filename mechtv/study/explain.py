"""Everything that explains one vector: each analysis once, what several need computed once.

A part is one method of `_Inquiry`; a new one is that method and a line in `PARTS`. Use the analyses
themselves for other options than their defaults.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.analysis.ablation import ablate_heads
from mechtv.analysis.alignment import task_alignment
from mechtv.analysis.attention import attention_of_heads
from mechtv.analysis.decomposition import decompose
from mechtv.analysis.diagnostics import diagnostics
from mechtv.analysis.head_maps import head_maps
from mechtv.analysis.head_outputs import other_heads
from mechtv.analysis.heads import HeadRanking, rank_heads
from mechtv.analysis.integrated_jacobian import integrate_jacobian
from mechtv.analysis.linearity import linearity
from mechtv.analysis.logit_lens import logit_lens
from mechtv.analysis.propagation import fit_propagation
from mechtv.analysis.readers import readers
from mechtv.analysis.reconstruction import reconstruct_ov
from mechtv.analysis.rotation import RotationStretch, rotation_stretch
from mechtv.analysis.subject import Subject
from mechtv.errors import InvalidInput, UnknownName
from mechtv.evaluation.accuracy import Evaluation, evaluate
from mechtv.evaluation.seeds import seed_for
from mechtv.models import ModelCard, describe
from mechtv.progress import progress as progress_over
from mechtv.tasks.task import Task
from mechtv.vectors.vector import TaskVector

KEY_SHARE = 0.1
"""The share of the heads at or behind theta's block that are key heads (the paper's)."""

RANDOM_HEADS = 20
"""How many others their attention is compared with; all where a late block leaves fewer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Finding:
    """One part of an explanation.

    Args:
        name: in `PARTS`.
        result: what the analysis gave, with a `table`; None where it was refused.
        seconds: how long it took, without what it shares with parts before it.
        refusal: why this vector, model or task does not allow it, in a sentence.
    """

    name: str
    result: Any
    seconds: float
    refusal: str = ""

    def table(self) -> pd.DataFrame:
        """The result's table, or the refusal."""
        if self.refusal:
            return pd.DataFrame([{"part": self.name, "refusal": self.refusal}])
        found: pd.DataFrame = self.result.table()
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Explanation:
    """What `explain` found.

    Args:
        layer: theta is added at this block's input.
        zero_shot, injected: scores without and under the vector, on the same queries.
        findings: the parts, in their order.
    """

    model: ModelCard
    task: Task
    vector: TaskVector
    layer: int
    zero_shot: Evaluation
    injected: Evaluation
    findings: tuple[Finding, ...]
    seed: int
    seconds: float

    def __getitem__(self, name: str) -> Any:
        """The result of a part; None where it was refused.

        Raises:
            UnknownName: if it was not run.
        """
        for finding in self.findings:
            if finding.name == name:
                return finding.result
        raise UnknownName("part", name, [finding.name for finding in self.findings])

    def __contains__(self, name: str) -> bool:
        return any(finding.name == name for finding in self.findings)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Each part's table by the part's name, and the scores as `evaluation`."""
        scores = pd.concat([self.zero_shot.table(), self.injected.table()], ignore_index=True)
        return {"evaluation": scores} | {f.name: f.table() for f in self.findings}

    def table(self) -> pd.DataFrame:
        """One row a part: how long it took, and why it was refused, if it was."""
        return pd.DataFrame(
            {"part": finding.name, "seconds": finding.seconds, "refusal": finding.refusal}
            for finding in self.findings
        )


def explain(
    model: TransformerBridge,
    task: Task,
    vector: TaskVector,
    *,
    parts: Sequence[str] | None = None,
    n: int | None = None,
    seed: int | None = None,
    progress: bool | None = None,
    on_finished: Callable[[Finding], None] | None = None,
) -> Explanation:
    """Run every analysis of one vector, or some.

    Args:
        vector: one that adds one value to the residual stream at the last token.
        parts: names of `PARTS`; all if None. What a part needs of others is computed for it.
        n: how many test queries are scored; the whole split if None.
        seed: fixes splits and everything drawn; the vector's own if None.
        on_finished: called with each part as soon as it is done, so nothing is lost if the rest is
            interrupted.

    Returns:
        The parts; one that the model or the task does not allow (too few heads for random sets,
        answers that span everything) holds the sentence that refused it.

    Raises:
        InvalidInput: for an unknown part, or a vector of another form.
    """
    began = time.perf_counter()
    names = check_parts(parts)
    seed = seed_for(vector) if seed is None else seed
    layer = Subject.of(model, vector).layer
    score = partial(evaluate, model, task, n=n, seed=seed, progress=progress)
    zero_shot, injected = score(), score(vector)
    inquiry = _Inquiry(model, task, vector, n=n, seed=seed, progress=progress)
    findings = []
    for name in progress_over(names, title="parts", show=progress):
        findings.append(_finding(inquiry, name))
        if on_finished is not None:
            on_finished(findings[-1])
    return Explanation(
        model=describe(model),
        task=task,
        vector=vector,
        layer=layer,
        zero_shot=zero_shot,
        injected=injected,
        findings=tuple(findings),
        seed=seed,
        seconds=time.perf_counter() - began,
    )


def _finding(inquiry: "_Inquiry", name: str) -> Finding:
    """A part; what an analysis refuses is said, and does not end the others."""
    started = time.perf_counter()
    result, refusal = None, ""
    try:
        result = inquiry.result(name)
    except InvalidInput as error:
        refusal = str(error)
    seconds = time.perf_counter() - started
    return Finding(name=name, result=result, seconds=seconds, refusal=refusal)


def check_parts(parts: Sequence[str] | None) -> tuple[str, ...]:
    """The names of parts, each once; all if None.

    Raises:
        UnknownName: for one that is none.
    """
    names = tuple(PARTS) if parts is None else tuple(dict.fromkeys(parts))
    for name in names:
        if name not in PARTS:
            raise UnknownName("part", name, list(PARTS))
    return names


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadRankings:
    """Heads ranked by saliency and by exhaustive ablation, on the same queries."""

    saliency: HeadRanking
    ablation: HeadRanking

    def table(self) -> pd.DataFrame:
        """The heads' scores under both."""
        return pd.concat([self.saliency.table(), self.ablation.table()], ignore_index=True)


class _Inquiry:
    """The parts of one explanation; each is computed when it is first asked for."""

    def __init__(
        self,
        model: TransformerBridge,
        task: Task,
        vector: TaskVector,
        *,
        n: int | None,
        seed: int,
        progress: bool | None,
    ) -> None:
        self._subject = (model, task, vector)
        self._model, self._task, self._vector = model, task, vector
        self._n, self._seed = n, seed
        self._common: dict[str, Any] = {"seed": seed, "progress": progress}
        self._found: dict[str, Any] = {}

    def result(self, name: str) -> Any:
        """A part's result."""
        if name not in self._found:
            self._found[name] = PARTS[name](self)
        return self._found[name]

    def reconstruction(self) -> Any:
        return reconstruct_ov(*self._subject, n=self._n, **self._common)

    def readers(self) -> Any:
        return readers(*self._subject, n=self._n, **self._common)

    def decomposition(self) -> Any:
        return decompose(*self._subject, n=self._n, **self._common)

    def heads(self) -> HeadRankings:
        rank = partial(rank_heads, *self._subject, **self._common)
        return HeadRankings(saliency=rank(by="saliency"), ablation=rank(by="ablation"))

    def ablation(self) -> Any:
        return ablate_heads(*self._subject, self._key_heads(), n=self._n, **self._common)

    def attention(self) -> Any:
        model, _, vector = self._subject
        heads = self._key_heads()
        others = other_heads(model, heads, layer=Subject.of(model, vector).layer)
        n_random = max(1, min(RANDOM_HEADS, len(others)))
        options = self._common | {"n": self._n, "n_random": n_random}
        return attention_of_heads(*self._subject, heads, **options)

    def head_maps(self) -> Any:
        return head_maps(*self._subject, n=self._n, **self._common)

    def propagation(self) -> Any:
        return fit_propagation(*self._subject, n_scored=self._n, **self._common)

    def jacobian(self) -> Any:
        return integrate_jacobian(*self._subject, **self._common)

    def rotation(self) -> RotationStretch:
        maps = [self.result("propagation"), self.result("jacobian")]
        return rotation_stretch(maps, seed=self._seed)

    def alignment(self) -> Any:
        return task_alignment(self._model, self._task, self._turned(), seed=self._seed)

    def linearity(self) -> Any:
        return linearity(*self._subject, n=self._n, **self._common)

    def lens(self) -> Any:
        return logit_lens(*self._subject, n=self._n, **self._common)

    def diagnostics(self) -> Any:
        return diagnostics(self._model, self._task, [self._vector], n=self._n, **self._common)

    def _key_heads(self) -> Any:
        return self.result("heads").saliency.top(KEY_SHARE)

    def _turned(self) -> dict[str, Tensor]:
        """Theta, and what the integrated map and its rotation make of it."""
        jacobian = self.result("jacobian")
        theta, matrix = jacobian.theta.double().cpu(), jacobian.matrix.double().cpu()
        (turn,) = rotation_stretch(jacobian, seed=self._seed).turns
        named = {"θ": theta, "Qθ": turn.rotation @ theta, "Wθ": matrix @ theta}
        return {name: value.to(jacobian.theta) for name, value in named.items()}


PARTS: dict[str, Callable[[_Inquiry], Any]] = {
    "reconstruction": _Inquiry.reconstruction,
    "readers": _Inquiry.readers,
    "decomposition": _Inquiry.decomposition,
    "heads": _Inquiry.heads,
    "ablation": _Inquiry.ablation,
    "attention": _Inquiry.attention,
    "head_maps": _Inquiry.head_maps,
    "propagation": _Inquiry.propagation,
    "jacobian": _Inquiry.jacobian,
    "rotation": _Inquiry.rotation,
    "alignment": _Inquiry.alignment,
    "linearity": _Inquiry.linearity,
    "lens": _Inquiry.lens,
    "diagnostics": _Inquiry.diagnostics,
}
"""The parts by name, in the order in which they are run and shown."""
