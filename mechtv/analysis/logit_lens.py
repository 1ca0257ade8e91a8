"""What the model would say at each depth if it stopped there: the logit lens of a run.

The final norm is recomputed on each state, then the unembedding follows (docs/analyses.md). A
state of depth d has passed d blocks: it is the input of block d, behind a vector's edit there; the
last one is the model's own output. For a vector by itself, see `lens`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.analysis.answers import rivals
from mechtv.analysis.lens import ROWS, Readings, best_tokens, lens_logits, read
from mechtv.errors import InvalidInput
from mechtv.evaluation.provenance import UNKNOWN, Provenance, setting_of
from mechtv.evaluation.seeds import seed_for
from mechtv.forward.memory import steady
from mechtv.forward.run import capture, in_batches
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import SplitName, Task
from mechtv.vectors.inject import check_fits
from mechtv.vectors.site import Site
from mechtv.vectors.vector import TaskVector


@dataclass(frozen=True, kw_only=True, eq=False)
class Lens:
    """The logit lens of the plain run, and of the run under a vector.

    Args:
        task, setting, split: what was read; `setting` is the vector's method, or `zero-shot`.
        layer: the first depth whose state the vector can change; None without a vector.
        queries: in order.
        plain, injected: the scores of the two runs; `injected` is None without a vector.
        tokens: the top tokens of each run's mean state, one row a (state, depth, rank), and of the
            vector itself, where it has one value in the residual stream.
    """

    task: str
    setting: str
    split: str
    layer: int | None
    queries: tuple[tuple[str, ...], ...]
    plain: Readings
    injected: Readings | None
    tokens: pd.DataFrame
    provenance: Provenance = UNKNOWN

    def table(self) -> pd.DataFrame:
        """One row a (run, score, depth): value, 95 % interval, n; the run is plain or injected."""
        where = {"task": self.task, "split": self.split}
        plain = {**where, "setting": "zero-shot", "layer": None, "run": "plain"}
        injected = {**where, "setting": self.setting, "layer": self.layer, "run": "injected"}
        runs = ((plain, self.plain), (injected, self.injected))
        return pd.DataFrame(
            {**about, **row, **self.provenance.columns()}
            for about, readings in runs
            if readings is not None
            for row in readings.rows()
        )


def logit_lens(
    model: TransformerBridge,
    task: Task,
    vector: TaskVector | None = None,
    *,
    n: int | None = None,
    split: SplitName = "test",
    seed: int | None = None,
    k: int = 5,
    progress: bool | None = None,
) -> Lens:
    """Read the residual stream at each query's last token, at every depth, with the logit lens.

    "Task Vectors, Learned Not Extracted" (docs/analyses.md). Scores are of the first answer
    token. The answer's rivals are the other labels, or for open answers the best wrong token of the
    run's own output under the vector; they are the same at every depth and in both runs.

    Args:
        vector: any task vector; the plain model alone if None.
        n: how many queries; all of the split if None.
        seed: decides the splits; None takes the seed that the vector was made with.
        k: how many top tokens are kept.

    Raises:
        InvalidInput: if the vector does not fit the model, or for an `n` or a `k` that cannot be.
    """
    seed = seed_for(vector) if seed is None else seed
    prompts = Prompts.of(model, task, split=split, n=n, seed=seed)
    for edit in vector.edits if vector is not None else ():
        check_fits(model, edit)
    if vector is not None and vector.acts_on == "new":
        raise InvalidInput(
            "This vector acts on new tokens only, and the lens reads prompts; give it with "
            '.acting_on("prompt").'
        )
    with torch.no_grad(), steady(model):
        plain = stream(model, prompts, progress=progress)
        under = plain
        if vector is not None:
            under = stream_under(model, prompts, vector, plain, progress)
        against = rivals_under(model, prompts, under[None, :, -1])
        readings = read(model, plain, prompts, against)
        injected = None
        if vector is not None:
            injected = read_under(model, under, prompts, against, vector, readings)
    return Lens(
        task=task.name,
        setting=setting_of(vector, 0),
        split=split,
        layer=None if vector is None else first_depth(vector),
        queries=tuple(example.key for example in prompts.examples),
        plain=readings,
        injected=injected,
        tokens=pd.DataFrame(_all_tokens(model, vector, plain.mean(dim=0), under.mean(dim=0), k)),
        provenance=Provenance.of(model, task, seed),
    )


def stream(
    model: TransformerBridge,
    prompts: Prompts,
    vector: TaskVector | None = None,
    *,
    first: int = 0,
    progress: bool | None = None,
) -> Float[Tensor, "query depth d_model"]:
    """The residual stream at each row's last token, from one depth to the last, on the CPU."""
    n_layers = model.cfg.n_layers
    sites = [Site(layer=layer) for layer in range(first, n_layers)]
    sites.append(Site(component="resid_post", layer=n_layers - 1))

    def states(batch: Prompts) -> Float[Tensor, "batch depth d_model"]:
        found = capture(model, batch, sites, vector)
        return torch.stack([found[site][:, 0].cpu() for site in sites], dim=1)

    return in_batches(prompts, states, title=f"lens, {setting_of(vector, 0)}", show=progress)


def stream_under(
    model: TransformerBridge,
    prompts: Prompts,
    vector: TaskVector,
    plain: Float[Tensor, "query depth d_model"],
    progress: bool | None = None,
) -> Float[Tensor, "query depth d_model"]:
    """The whole residual stream under a vector; what it cannot change is that of the plain run."""
    first = first_depth(vector)
    changed = stream(model, prompts, vector, first=first, progress=progress)
    return torch.cat([plain[:, :first], changed], dim=1)


def first_depth(vector: TaskVector) -> int:
    """The first depth whose state a vector can change."""
    return min(site.layer + (site.component != "resid_pre") for site in vector.sites)


def read_under(
    model: TransformerBridge,
    states: Float[Tensor, "query depth d_model"],
    prompts: Prompts,
    against: Int[Tensor, "query rival"],
    vector: TaskVector,
    plain: Readings,
) -> Readings:
    """The readings of what `stream_under` gave; what is that of the plain run is not read anew."""
    first = first_depth(vector)
    return read(model, states[:, first:], prompts, against).behind(plain, first)


def rivals_under(
    model: TransformerBridge, prompts: Prompts, finals: Float[Tensor, "run query d_model"]
) -> Int[Tensor, "query rival"]:
    """What each answer stands against in every run and at every depth.

    The other labels, or for open answers the best wrong token of the mean logits of some runs.

    Args:
        finals: the states behind the last block in these runs.
    """
    parts = []
    for rows in torch.arange(len(prompts)).split(ROWS):
        logits = torch.stack([lens_logits(model, states[rows]) for states in finals]).mean(dim=0)
        parts.append(rivals(logits, prompts.select(rows.tolist())).cpu())
    return torch.cat(parts)


def _all_tokens(
    model: TransformerBridge,
    vector: TaskVector | None,
    plain: Float[Tensor, "depth d_model"],
    under: Float[Tensor, "depth d_model"],
    k: int,
) -> Iterator[dict[str, object]]:
    """The top tokens of the mean states, and of a vector that is one value in the stream."""
    yield from _tokens(model, "plain", plain, k)
    if vector is None:
        return
    yield from _tokens(model, "injected", under, k)
    edit, first = vector.edits[0], first_depth(vector)
    value = edit.operation.tensors().get("value")
    alone = len(vector.edits) == 1 and edit.site.component != "z"
    if alone and value is not None and value.numel() == model.cfg.d_model:
        yield from _tokens(model, "theta", value.detach().reshape(1, -1), k, first)


def _tokens(
    model: TransformerBridge,
    name: str,
    states: Float[Tensor, "depth d_model"],
    k: int,
    first: int = 0,
) -> Iterator[dict[str, object]]:
    for depth, best in enumerate(best_tokens(model, states, k), start=first):
        for rank, (token, logit) in enumerate(best, start=1):
            yield {"state": name, "depth": depth, "rank": rank, "token": token, "logit": logit}
