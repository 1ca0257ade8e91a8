"""What happens to a task behind each of several injection layers, depth by depth.

For each vector: what the logit lens reads of the run under it, how far its states lie in the span
of the answers, and how large and how aligned the change is that it made (docs/analyses.md;
protocol L10). Depths are those of `logit_lens`: depth d is the input of block d.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.analysis.alignment import AnswerSpan
from mechtv.analysis.lens import Readings, means, read, rows_of
from mechtv.analysis.logit_lens import read_under, rivals_under, stream, stream_under
from mechtv.analysis.subject import Subject
from mechtv.errors import InvalidInput
from mechtv.evaluation.provenance import UNKNOWN, Provenance, setting_of
from mechtv.evaluation.seeds import common_seed
from mechtv.forward.memory import steady
from mechtv.progress import progress as tracked
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import SplitName, Task
from mechtv.vectors.vector import TaskVector

STATE, CHANGE, SIZE = "alignment of the state", "alignment of the change", "size of the change"


@dataclass(frozen=True, kw_only=True, eq=False)
class Change:
    """What one vector does to the residual stream at the last token.

    Args:
        layer: the block at whose input it is added; `setting` its method.
        readings: what the lens reads of the run under it, at each depth.
        state: the task alignment of that run's states, at each depth.
        change: that of injected minus plain; `size` its norm over that of the plain state. Both
            from depth `layer` on, where it is the vector itself.
    """

    layer: int
    setting: str
    readings: Readings
    state: Float[np.ndarray, "depth query"]
    change: Float[np.ndarray, "changed query"]
    size: Float[np.ndarray, "changed query"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Diagnostics:
    """The layer-wise diagnostics of several injection layers.

    Args:
        changes: one an injection layer, in rising order.
        plain, plain_state: what the lens reads of the plain run, and the task alignment of its
            states.
        span: what states and changes were projected on. Where it is the whole space, alignments
            are 1 and left out of the table.
    """

    task: str
    split: str
    queries: tuple[tuple[str, ...], ...]
    changes: tuple[Change, ...]
    plain: Readings
    plain_state: Float[np.ndarray, "depth query"]
    span: AnswerSpan
    provenance: Provenance = UNKNOWN

    @property
    def layers(self) -> tuple[int, ...]:
        """The injection layers."""
        return tuple(change.layer for change in self.changes)

    def __getitem__(self, layer: int) -> Change:
        """What the vector at a layer does."""
        return self.changes[self.layers.index(layer)]

    def table(self) -> pd.DataFrame:
        """One row a (run, injection layer, score, depth): value, 95 % interval, n.

        The run is `plain` (which has no layer), `injected`, or `change` for injected minus plain.
        """
        where = {"task": self.task, "split": self.split}
        plain = {**where, "setting": "zero-shot", "layer": None, "run": "plain"}
        rows = [plain | row for row in (*self.plain.rows(), *self._aligned(self.plain_state))]
        for c in self.changes:
            about = {**where, "setting": c.setting, "layer": c.layer}
            rows += [
                {**about, "run": "injected", **row}
                for row in (*c.readings.rows(), *self._aligned(c.state))
            ]
            size = rows_of(SIZE, means(c.size), c.layer)
            rows += [
                {**about, "run": "change", **row}
                for row in (*self._aligned(c.change, CHANGE, c.layer), *size)
            ]
        return pd.DataFrame({**row, **self.provenance.columns()} for row in rows)

    def _aligned(
        self, values: Float[np.ndarray, "depth query"], score: str = STATE, first: int = 0
    ) -> list[dict[str, object]]:
        return [] if self.span.is_everything else rows_of(score, means(values), first)


def diagnostics(
    model: TransformerBridge,
    task: Task,
    vectors: Sequence[TaskVector] | Mapping[int, TaskVector],
    *,
    n: int | None = None,
    split: SplitName = "test",
    seed: int | None = None,
    gain: bool = True,
    dimensions: int | None = None,
    progress: bool | None = None,
) -> Diagnostics:
    """Read the residual stream under vectors that are added at different layers.

    "Task Vectors, Learned Not Extracted" (docs/analyses.md). Norms and alignments are of centred
    states in LayerNorm models. Alignments are means over queries, each query's of its own state.
    Rivals of open answers are the best wrong tokens of the mean output under the vectors, so that
    every curve is of one quantity.

    Args:
        vectors: each one value added at the last prompt token of one layer, all of other layers; or
            the same by layer.
        n: how many queries; all of the split if None.
        seed: decides the splits; None takes the seed that the vectors were made with.
        gain, dimensions: as in `task_alignment`.

    Raises:
        InvalidInput: for no vectors, two of one layer, one under another layer's number, or one of
            another form.
    """
    by_layer = _by_layer(model, vectors)
    seed = common_seed(by_layer.values()) if seed is None else seed
    prompts = Prompts.of(model, task, split=split, n=n, seed=seed)
    span = AnswerSpan.of(model, task, gain=gain, dimensions=dimensions, seed=seed)
    with torch.no_grad(), steady(model):
        plain = stream(model, prompts, progress=progress)
        states = [stream_under(model, prompts, v, plain, progress) for v in by_layer.values()]
        finals = torch.stack([under[:, -1] for under in states])
        against = rivals_under(model, prompts, finals)
        readings = read(model, plain, prompts, against)
        title = f"injection layers, {task.name}"
        pairs = zip(by_layer.values(), states, strict=True)
        changes = [
            _change(
                Subject.of(model, vector).layer,
                setting_of(vector, 0),
                read_under(model, under, prompts, against, vector, readings),
                span,
                plain,
                under,
            )
            for vector, under in tracked(pairs, title=title, show=progress, total=len(by_layer))
        ]
    return Diagnostics(
        task=task.name,
        split=split,
        queries=tuple(example.key for example in prompts.examples),
        changes=tuple(changes),
        plain=readings,
        plain_state=_by_depth(span.alignment(plain)),
        span=span,
        provenance=Provenance.of(model, task, seed),
    )


def _change(
    layer: int,
    setting: str,
    readings: Readings,
    span: AnswerSpan,
    plain: Float[Tensor, "query depth d_model"],
    injected: Float[Tensor, "query depth d_model"],
) -> Change:
    before, after = plain[:, layer:].double(), injected[:, layer:].double()
    sizes = span.seen(after - before).norm(dim=-1) / span.seen(before).norm(dim=-1)
    return Change(
        layer=layer,
        setting=setting,
        readings=readings,
        state=_by_depth(span.alignment(injected)),
        change=_by_depth(span.alignment(after - before)),
        size=_by_depth(sizes),
    )


def _by_depth(values: Float[Tensor, "query depth"]) -> Float[np.ndarray, "depth query"]:
    turned: Float[np.ndarray, "depth query"] = values.T.cpu().numpy()
    return turned


def _by_layer(
    model: TransformerBridge, vectors: Sequence[TaskVector] | Mapping[int, TaskVector]
) -> dict[int, TaskVector]:
    """The vectors by the layer where they are added, in rising order."""
    given = list(vectors.items() if isinstance(vectors, Mapping) else enumerate(vectors))
    if not given:
        raise InvalidInput("There are no vectors to diagnose; give one for each injection layer.")
    found: dict[int, TaskVector] = {}
    for name, vector in given:
        layer = Subject.of(model, vector).layer
        if isinstance(vectors, Mapping) and name != layer:
            raise InvalidInput(
                f"The vector under {name} is added at layer {layer}; give it under {layer}."
            )
        if layer in found:
            raise InvalidInput(f"Two vectors are added at layer {layer}; give one for each layer.")
        found[layer] = vector
    return dict(sorted(found.items()))
