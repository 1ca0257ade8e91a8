"""How far a vector lies in the directions that read a task's answers.

The norm of its projection on the span of the answers' unembedding rows, over its norm: 1 for a
vector that can do nothing but move those logits, and sqrt(dimensions of the span / d_model) for a
random one (docs/analyses.md). It says nothing of which answer is favoured, nor by how much.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from scipy import stats
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.analysis.circuits import gain as gain_of
from mechtv.analysis.lens import named_states
from mechtv.errors import InvalidInput
from mechtv.evaluation.intervals import LEVEL
from mechtv.evaluation.provenance import UNKNOWN, Provenance
from mechtv.evaluation.seeds import common_seed
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import Task
from mechtv.vectors.vector import TaskVector


@dataclass(frozen=True, kw_only=True, eq=False)
class AnswerSpan:
    """The span of the unembedding rows of a task's answers.

    Args:
        basis: orthonormal, in float64 on the CPU.
        n_tokens: how many rows there are: the labels' first tokens, or for open answers the
            distinct first tokens of the training answers.
        gain: whether the final norm's gain is in the rows.
        centred: whether rows and vectors are centred, as the model's norms centre them (LayerNorm).
    """

    basis: Float[Tensor, "dim d_model"]
    n_tokens: int
    gain: bool
    centred: bool

    @classmethod
    def of(
        cls,
        model: TransformerBridge,
        task: Task,
        *,
        gain: bool = True,
        dimensions: int | None = None,
        seed: int = 0,
    ) -> "AnswerSpan":
        """That of a task; the training answers are those of the seed's split.

        Args:
            dimensions: only so many directions, those that hold most of the rows; all if None.

        Raises:
            InvalidInput: for more dimensions than the rows span, or fewer than one.
        """
        tokens = _answer_tokens(model, task, seed)
        rows = model.W_U.detach()[:, tokens].T.double().cpu()
        if gain:
            rows = rows * gain_of(model.ln_final).double().cpu()
        centred = not bool(model.ln_final.uses_rms_norm)
        rows = _centred(rows) if centred else rows
        _, sizes, directions = torch.linalg.svd(rows, full_matrices=False)
        smallest = sizes.max() * max(rows.shape) * torch.finfo(rows.dtype).eps
        rank = int((sizes > smallest).sum())
        if dimensions is not None and not 1 <= dimensions <= rank:
            raise InvalidInput(
                f"dimensions={dimensions} cannot be: the answers of {task.name!r} span {rank}; use "
                f"1 to {rank}."
            )
        kept = directions[: rank if dimensions is None else dimensions]
        return cls(basis=kept, n_tokens=len(tokens), gain=gain, centred=centred)

    @property
    def dim(self) -> int:
        """How many dimensions it has."""
        return len(self.basis)

    @property
    def width(self) -> int:
        """How many dimensions vectors have: d_model, or one fewer where they are centred."""
        return self.basis.shape[1] - self.centred

    @property
    def is_everything(self) -> bool:
        """Whether every vector lies in it, so that alignment says nothing."""
        return self.dim >= self.width

    @property
    def of_random(self) -> tuple[float, float, float]:
        """The alignment of random vectors: root mean square, and the ends of a 95 % range.

        The square of an isotropic vector's alignment follows a beta distribution.
        """
        if self.is_everything:
            return 1.0, 1.0, 1.0
        squared = stats.beta(self.dim / 2, (self.width - self.dim) / 2)
        low, high = np.sqrt(squared.ppf([(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
        return float(np.sqrt(self.dim / self.width)), float(low), float(high)

    def alignment(self, states: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch"]:
        """Norm of the projection on the span over the norm, in float64; NaN for a zero vector."""
        states = self.seen(states.detach().cpu().double())
        aligned: Tensor = (states @ self.basis.T).norm(dim=-1) / states.norm(dim=-1)
        return aligned

    def seen(self, states: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """States as the model's norms see them."""
        return _centred(states) if self.centred else states


@dataclass(frozen=True, kw_only=True, eq=False)
class Alignment:
    """The task alignment of named vectors.

    Args:
        span: what they were projected on; `values` one a name.
    """

    task: str
    names: tuple[str, ...]
    values: Float[np.ndarray, " vector"]
    span: AnswerSpan
    provenance: Provenance = UNKNOWN

    def __getitem__(self, name: str) -> float:
        return float(self.values[self.names.index(name)])

    def table(self) -> pd.DataFrame:
        """One row a vector: its alignment beside that of random vectors (with a 95 % range)."""
        random, low, high = self.span.of_random
        return pd.DataFrame(
            {
                "task": self.task,
                "vector": name,
                "alignment": float(value),
                "random": random,
                "random_low": low,
                "random_high": high,
                "dimensions": self.span.dim,
                "of": self.span.width,
                "tokens": self.span.n_tokens,
                "gain": self.span.gain,
            }
            | self.provenance.columns()
            for name, value in zip(self.names, self.values, strict=True)
        )


def task_alignment(
    model: TransformerBridge,
    task: Task,
    vectors: Mapping[str, Float[Tensor, " d_model"] | TaskVector],
    *,
    gain: bool = True,
    dimensions: int | None = None,
    seed: int | None = None,
) -> Alignment:
    """The norm of vectors' projections on the span of the answers' unembedding rows, over theirs.

    "Task Vectors, Learned Not Extracted" (docs/analyses.md).

    Args:
        vectors: by name, such as theta, Q theta and W theta; of the residual stream, or task
            vectors with one such value.
        gain: put the final norm's gain into the rows, since logits read the residual stream through
            it; without, the rows stand as they are, and a vector is compared with what they read
            behind the norm.
        dimensions: project on so many directions only, those that hold most of the rows. Hundreds
            of open answers span so much of the space that a random vector is aligned too.
        seed: whose training split gives the open answers. If None, the seed that the task vectors
            were made with, or 0.

    Raises:
        InvalidInput: for no vectors, one of another width, a zero vector, or a task with so many
            answers that their rows span the whole space.
    """
    names, states = named_states(model, vectors)
    if seed is None:
        seed = common_seed([v for v in vectors.values() if isinstance(v, TaskVector)])
    span = AnswerSpan.of(model, task, gain=gain, dimensions=dimensions, seed=seed)
    if span.is_everything:
        raise InvalidInput(
            f"The first tokens of {task.name!r}'s {span.n_tokens} answers span all {span.width} "
            "dimensions, so that every vector is aligned; give dimensions=, or another task."
        )
    values = span.alignment(states)
    if bool(values.isnan().any()):
        zero = names[int(values.isnan().long().argmax())]
        raise InvalidInput(f"{zero!r} is zero, so it has no direction; give another vector.")
    return Alignment(
        task=task.name,
        names=names,
        values=values.numpy(),
        span=span,
        provenance=Provenance.of(model, task, seed),
    )


def _answer_tokens(model: TransformerBridge, task: Task, seed: int) -> list[int]:
    """The distinct first tokens of the labels, or of the training answers."""
    n = 1 if task.labels else None
    prompts = Prompts.of(model, task, split="train", n=n, seed=seed)
    answers = prompts.label_tokens if task.labels else prompts.answers
    return sorted({ids[0] for ids in answers})


def _centred(rows: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
    return rows - rows.mean(dim=-1, keepdim=True)
