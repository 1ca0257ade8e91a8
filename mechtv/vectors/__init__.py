"""Task vectors: sites, edits, the vector with its card, its file, and how it enters a model."""

from mechtv.vectors.card import Card
from mechtv.vectors.edits import Add, Affine, Edit, Linear, Operation, Replace, ResidualMLP
from mechtv.vectors.site import Site
from mechtv.vectors.vector import TaskVector

__all__ = [
    "Add",
    "Affine",
    "Card",
    "Edit",
    "Linear",
    "Operation",
    "Replace",
    "ResidualMLP",
    "Site",
    "TaskVector",
]
