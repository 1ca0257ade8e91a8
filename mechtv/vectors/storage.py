"""Save and load a task vector as one safetensors file, never as a pickle.

The header holds a schema version, the card and, for each edit, its site and operation; so a file
can be read by a person with any safetensors viewer. Files are written under a temporary name and
renamed.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import Tensor

from mechtv.errors import InvalidInput
from mechtv.files import write_whole
from mechtv.vectors.card import Card
from mechtv.vectors.edits import OPERATIONS, Edit
from mechtv.vectors.site import Site
from mechtv.vectors.vector import TaskVector

SCHEMA = "mechtv.task_vector/2"
_OLDER = ("mechtv.task_vector/1",)  # knew no heads


def save(vector: TaskVector, path: str | Path) -> Path:
    """Write `vector` to `path`. Shared and non-contiguous tensors are written out in full.

    Raises:
        InvalidInput: if the folder does not exist.
    """
    tensors = {
        f"{index}.{name}": tensor.detach().cpu().contiguous().clone()
        for index, edit in enumerate(vector.edits)
        for name, tensor in edit.operation.tensors().items()
    }
    return write_whole(path, serialize(tensors, metadata=_header(vector)))


def load(path: str | Path) -> TaskVector:
    """Read a task vector, tensors on the CPU.

    Raises:
        InvalidInput: if there is no such file, it is truncated or no safetensors file, or its
            schema is not one that this version reads.
    """
    path = Path(path)
    if not path.is_file():
        raise InvalidInput(f"There is no file {str(path)!r}.")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise InvalidInput(
            f"{str(path)!r} is truncated or no safetensors file ({error}); save the vector again."
        ) from error
    return _read(path, header, tensors)


def _header(vector: TaskVector) -> dict[str, str]:
    edits = [
        {
            "component": edit.site.component,
            "layer": edit.site.layer,
            "positions": edit.site.positions,
            "heads": edit.site.heads,
            "operation": edit.operation_name,
        }
        for edit in vector.edits
    ]
    return {
        "schema": SCHEMA,
        "acts_on": vector.acts_on,
        "edits": json.dumps(edits),
        "card": json.dumps(vector.card.to_json()),
    }


def _read(path: Path, header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> TaskVector:
    schema = header.get("schema")
    if schema not in (SCHEMA, *_OLDER):
        raise InvalidInput(
            f"{str(path)!r} has the schema {schema!r}; this version of mechtv reads {SCHEMA!r}."
        )
    try:
        edits = tuple(
            _read_edit(plain, _tensors_of(index, tensors))
            for index, plain in enumerate(json.loads(header["edits"]))
        )
        card = Card.from_json(json.loads(header["card"]))
        return TaskVector(edits=edits, card=card, acts_on=header["acts_on"])  # type: ignore[arg-type]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidInput(
            f"{str(path)!r} has a damaged header ({error!r}); save the vector again."
        ) from error


def _tensors_of(index: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefix = f"{index}."
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _read_edit(plain: Mapping[str, Any], tensors: dict[str, Tensor]) -> Edit:
    positions, heads = plain["positions"], plain.get("heads")
    site = Site(
        component=plain["component"],
        layer=plain["layer"],
        positions=positions if positions == "all" else tuple(positions),
        heads=None if heads is None else tuple(heads),
    )
    return Edit(site=site, operation=OPERATIONS[plain["operation"]](**tensors))
