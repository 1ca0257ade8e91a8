"""The card of a vector that a method has just made."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformer_lens.model_bridge import TransformerBridge

from mechtv.models import describe
from mechtv.tasks.task import Task
from mechtv.vectors.card import Card


def card_for(
    model: TransformerBridge,
    task: Task,
    *,
    method: str,
    settings: Mapping[str, Any],
    seed: int,
    curve: Sequence[Mapping[str, float]] = (),
) -> Card:
    """A card filled in from the model and the task."""
    about = describe(model)
    return Card(
        method=method,
        settings=dict(settings),
        model=about.name,
        model_revision=about.revision,
        weights=about.weights,
        task=task.name,
        template=task.template.description,
        seed=int(seed),
        dtype=about.dtype,
        curve=tuple(curve),
    )
