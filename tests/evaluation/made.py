"""Vectors made by hand, and two tasks to score them on."""

from dataclasses import replace

import torch
from builders import D_MODEL
from evaluation.invented import LABELS, task_of

from mechtv.vectors import Add, Card, Edit, Replace, Site, TaskVector


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def a_vector(seed=0, layer=1, operation=Add, made_with=0, acts_on="prompt", task="open"):
    edit = Edit(site=Site(layer=layer), operation=operation(value=2 * noise(D_MODEL, seed=seed)))
    card = Card(method="by hand", task=task, seed=made_with)
    return TaskVector(edits=(edit,), card=card, acts_on=acts_on)


def some():
    """Vectors at other layers, of other operations, on other tokens."""
    return {
        "early": a_vector(0, 0),
        "late": a_vector(1, 2, Replace, task="closed"),
        "both": a_vector(2, 1, acts_on="both"),
    }


def two_tasks():
    return [replace(task_of(), name="open"), replace(task_of(LABELS), name="closed")]
