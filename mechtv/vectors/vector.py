"""The task vector: edits and a card, whatever method made it.

Everything downstream takes a `TaskVector` and never asks how it was obtained.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Literal, get_args

import pandas as pd
import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.vectors.card import Card
from mechtv.vectors.edits import Add, Edit
from mechtv.vectors.inject import inject
from mechtv.vectors.layout import ActsOn
from mechtv.vectors.site import Site, checked_positions


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskVector:
    """A tuple of edits, and the card that says where they came from.

    Args:
        edits: applied together; edits at one site act in order.
        card: provenance.
        acts_on: `prompt` tokens, `new` (generated) tokens, or `both`. On new tokens the edit of
            position -1 acts at each of them.

    Raises:
        InvalidInput: for no edits or an unknown `acts_on`.
    """

    edits: tuple[Edit, ...]
    card: Card
    acts_on: ActsOn = "prompt"

    def __post_init__(self) -> None:
        if not self.edits:
            raise InvalidInput("A task vector needs at least one edit; it was given none.")
        if self.acts_on not in get_args(ActsOn):
            raise InvalidInput(
                f"acts_on={self.acts_on!r} is unknown; use one of {', '.join(get_args(ActsOn))}."
            )

    @contextmanager
    def applied(self, model: TransformerBridge) -> Iterator[TransformerBridge]:
        """Apply the vector to every call of `model` inside the `with` block.

        Raises:
            InvalidInput: if the vector does not fit the model.
        """
        with inject(model, self.edits, acts_on=self.acts_on):
            yield model

    # --- algebra of additive vectors -------------------------------------------------------------

    def __add__(self, other: "TaskVector") -> "TaskVector":
        """Add two additive vectors: values at one site are summed, other sites are joined."""
        if not isinstance(other, TaskVector):
            return NotImplemented
        if self.acts_on != other.acts_on:
            raise InvalidInput(
                f"One vector acts on {self.acts_on!r}, the other on {other.acts_on!r}; "
                "give both the same with .acting_on(...) before adding them."
            )
        left, right = _values_by_site(self), _values_by_site(other)
        summed = {
            site: _summed(site, left.get(site), right.get(site)) for site in {**left, **right}
        }
        edits = tuple(Edit(site=site, operation=Add(value=value)) for site, value in summed.items())
        card = _derived_card("sum", self.card, other.card)
        return TaskVector(edits=edits, card=card, acts_on=self.acts_on)

    def __sub__(self, other: "TaskVector") -> "TaskVector":
        if not isinstance(other, TaskVector):
            return NotImplemented
        return self + other.scaled(-1.0)

    def __neg__(self) -> "TaskVector":
        return self.scaled(-1.0)

    def __mul__(self, factor: object) -> "TaskVector":
        if not isinstance(factor, Real):
            return NotImplemented
        return self.scaled(float(factor))

    __rmul__ = __mul__

    def scaled(self, factor: float) -> "TaskVector":
        """The vector times `factor`.

        Raises:
            InvalidInput: if an edit is not an `Add`.
        """
        edits = tuple(
            Edit(site=site, operation=Add(value=factor * value))
            for site, value in _values_by_site(self).items()
        )
        card = replace(_derived_card("scaled", self.card), settings={"factor": float(factor)})
        return TaskVector(edits=edits, card=card, acts_on=self.acts_on)

    # --- the same vector in another form ---------------------------------------------------------

    def acting_on(self, tokens: ActsOn) -> "TaskVector":
        """The same vector acting on `prompt`, `new` or `both` tokens."""
        return replace(self, acts_on=tokens)

    def to(self, target: str | torch.device | torch.dtype) -> "TaskVector":
        """The same vector on another device or in another data type."""
        edits = tuple(
            replace(edit, operation=edit.operation.map(lambda x: x.to(target)))
            for edit in self.edits
        )
        return replace(self, edits=edits)

    def placed(
        self, layers: Sequence[int], positions: Sequence[int] | Literal["all"] = (-1,)
    ) -> "TaskVector":
        """The same one value at other layers and positions, the same at each of them.

        Raises:
            InvalidInput: unless the vector has one edit, with one value for all its positions, and
                the layers are distinct.
        """
        one = _shared_value(self.edits[0])
        if len(set(layers)) < len(layers):
            raise InvalidInput(f"layers={list(layers)} names a layer twice; give each once.")
        if len(self.edits) > 1 or any(
            value.ndim > (2 if one.site.component == "z" else 1)
            for name, value in one.operation.tensors().items()
            if name == "value"
        ):
            raise InvalidInput(
                f"{self} holds several values; only a single one can be placed anew."
            )
        sites = [
            replace(one.site, layer=layer, positions=checked_positions(positions))
            for layer in sorted(layers)
        ]
        settings = {"layers": sorted(layers), "positions": sites[0].positions if sites else ()}
        card = replace(_derived_card("placed", self.card), settings=settings)
        edits = tuple(Edit(site=site, operation=one.operation) for site in sites)
        return TaskVector(edits=edits, card=card, acts_on=self.acts_on)

    # --- what it is ------------------------------------------------------------------------------

    @property
    def sites(self) -> tuple[Site, ...]:
        """Where it acts."""
        return tuple(edit.site for edit in self.edits)

    @property
    def n_parameters(self) -> int:
        """How many numbers it holds."""
        return sum(x.numel() for edit in self.edits for x in edit.operation.tensors().values())

    def value(self) -> Tensor:
        """The value of a vector with exactly one edit that has one: `d_model`, or `slot d_model`.

        Raises:
            InvalidInput: if there are several edits, or the only one is a `Linear`.
        """
        if len(self.edits) != 1 or "value" not in self.edits[0].operation.tensors():
            raise InvalidInput(
                f"This vector has {len(self.edits)} edit(s) ({self}); .value() needs one that has "
                "a value. Read the others from .edits."
            )
        return self.edits[0].operation.tensors()["value"]

    def training_curve(self) -> pd.DataFrame:
        """The training curve, one row an evaluation.

        Raises:
            InvalidInput: if the vector was not trained.
        """
        if not self.card.curve:
            raise InvalidInput(f"A {self.card.method} vector was not trained; it has no curve.")
        return pd.DataFrame([dict(point) for point in self.card.curve])

    def table(self) -> pd.DataFrame:
        """One row an edit: component, layer, positions, heads, operation, shape, norm."""
        return pd.DataFrame(
            {
                "component": edit.site.component,
                "layer": edit.site.layer,
                "positions": str(edit.site.positions),
                "heads": "all" if edit.site.heads is None else str(edit.site.heads),
                "operation": edit.operation_name,
                "tensor": name,
                "shape": str(tuple(tensor.shape)),
                "norm": float(tensor.detach().cpu().double().norm()),
            }
            for edit in self.edits
            for name, tensor in edit.operation.tensors().items()
        )

    def __repr__(self) -> str:
        edits = "; ".join(f"{edit.operation_name} at {edit.site}" for edit in self.edits[:3])
        more = f"; and {len(self.edits) - 3} more" if len(self.edits) > 3 else ""
        return f"TaskVector({self.card.method} for {self.card.task}: {edits}{more})"

    # --- files -----------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file; see `mechtv.vectors.storage`."""
        from mechtv.vectors.storage import save  # storage builds vectors, so it stands above

        return save(self, path)

    @staticmethod
    def load(path: str | Path) -> "TaskVector":
        """Read a file that `save` wrote; see `mechtv.vectors.storage`."""
        from mechtv.vectors.storage import load

        return load(path)


def _shared_value(edit: Edit) -> Edit:
    """The edit with one value for its one position as a value for all positions."""
    features = 2 if edit.site.component == "z" else 1
    value = edit.operation.tensors().get("value")
    if value is None or value.ndim == features or len(value) > 1:
        return edit
    alone = replace(edit.operation, value=value[0])  # type: ignore[call-arg]
    return replace(edit, operation=alone)


def _values_by_site(vector: TaskVector) -> dict[Site, Tensor]:
    values: dict[Site, Tensor] = {}
    for edit in vector.edits:
        if not isinstance(edit.operation, Add):
            raise InvalidInput(
                f"Only additive vectors can be added or scaled; this one has a "
                f"{edit.operation_name!r} edit at {edit.site}."
            )
        values[edit.site] = _summed(edit.site, values.get(edit.site), edit.operation.value)
    return values


def _summed(site: Site, left: Tensor | None, right: Tensor | None) -> Tensor:
    present = [value for value in (left, right) if value is not None]
    features = 2 if site.component == "z" else 1
    if len({value.shape[-features:] for value in present}) > 1:
        shapes = " and ".join(str(tuple(value.shape)) for value in present)
        raise InvalidInput(
            f"Values of shapes {shapes} at {site} cannot be added; both vectors must be for "
            "models of one width."
        )
    return present[0] if len(present) == 1 else present[0] + present[1].to(present[0].device)


def _derived_card(method: str, *sources: Card) -> Card:
    """A card that keeps what its sources agree on."""
    shared = {
        name: getattr(sources[0], name)
        for name in ("model", "model_revision", "weights", "task", "template", "dtype")
        if len({getattr(card, name) for card in sources}) == 1
    }
    return Card(method=method, sources=sources, **shared)
