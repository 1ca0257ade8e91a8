"""Hidden-state task vectors: the mean residual stream of k-shot prompts at the last token.

`replace` writes that state over the zero-shot one (Hendel et al. 2023, *In-Context Learning Creates
Task Vectors*, section 3); `add` adds the mean difference between the k-shot and the zero-shot state
("Vanilla TV" of *Task Vectors, Learned Not Extracted*, section 3).
"""

from operator import index
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.forward.run import capture, in_batches
from mechtv.methods.cards import card_for
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import Task
from mechtv.vectors.edits import Add, Edit, Operation, Replace
from mechtv.vectors.site import Component, Site
from mechtv.vectors.vector import TaskVector

How = Literal["replace", "add"]


def extract_hidden_state(
    model: TransformerBridge,
    task: Task,
    layer: int | None = None,
    *,
    shots: int = 8,
    operation: How = "replace",
    component: Component = "resid_pre",
    n: int = 64,
    seed: int = 0,
    progress: bool | None = None,
) -> TaskVector:
    """The mean last-token state of `n` k-shot prompts with dummy queries.

    Args:
        layer: where the state is read and written; the middle block if None. Choose it on
            `validation`.
        shots: demonstrations in each prompt.
        operation: `replace` the zero-shot state, or `add` the mean difference.
        component: what is read and written; the input of the block by default.
        n: how many prompts are averaged; their queries are training examples, none of which is
            among its own demonstrations. Fewer if the training split is smaller.

    Returns:
        A vector with one edit at the last token; its value is `d_model` wide.

    Raises:
        InvalidInput: for an unknown operation, no shots, a layer that the model lacks, or a pool
            that is too small.
    """
    if operation not in get_args(How):
        raise InvalidInput(f"operation={operation!r} is unknown; use 'replace' or 'add'.")
    if shots < 1:
        raise InvalidInput(
            f"shots={shots} leaves nothing to extract; use 1 or more demonstrations."
        )
    layer = model.cfg.n_layers // 2 if layer is None else index(layer)
    site = Site(component=component, layer=layer)
    n = min(n, len(task.splits(seed).train))

    def mean_state(k: int) -> Float[Tensor, "*feature"]:
        prompts = Prompts.of(model, task, split="train", shots=k, n=n, seed=seed)
        with torch.no_grad():
            states = in_batches(
                prompts,
                lambda batch: capture(model, batch, [site])[site][:, 0],
                title=f"{k}-shot states of {task.name}",
                show=progress,
            )
        return _wide(states).mean(dim=0)

    in_context = mean_state(shots)
    edit: Operation
    if operation == "replace":
        edit = Replace(value=in_context)
    else:
        edit = Add(value=in_context - mean_state(0))
    settings = {
        "layer": layer,
        "component": component,
        "shots": shots,
        "operation": operation,
        "n": n,
    }
    card = card_for(model, task, method="hidden_state", settings=settings, seed=seed)
    return TaskVector(edits=(Edit(site=site, operation=edit),), card=card)


def _wide(states: Float[Tensor, "prompt *feature"]) -> Float[Tensor, "prompt *feature"]:
    return states if states.dtype == torch.float64 else states.float()
