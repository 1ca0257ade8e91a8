"""Layers as people give them: one number, or several."""

from collections.abc import Sequence
from operator import index
from typing import SupportsIndex

from mechtv.errors import InvalidInput


def as_layers(layer: SupportsIndex | Sequence[SupportsIndex]) -> tuple[int, ...]:
    """One or several distinct layers in rising order.

    Raises:
        InvalidInput: for none, or one given twice.
    """
    layers = [layer] if isinstance(layer, SupportsIndex) else list(layer)
    if not layers or len(set(layers)) != len(layers):
        raise InvalidInput(f"layer={tuple(layers)} must name one or more distinct layers.")
    return tuple(sorted(map(index, layers)))
