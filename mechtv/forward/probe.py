"""Read and change any TransformerLens hook point: what `run` and `capture` do not offer.

`last_residual` is for interventions at each row's last token, and recomputes only what they can
change. `observe` is for reading, at any token and on attention patterns; it is a full pass. Edits
that a `Site` can name belong into a `TaskVector`.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.forward.cut import cut_around
from mechtv.forward.full import pass_through
from mechtv.forward.memory import steady
from mechtv.forward.prefix import replay
from mechtv.forward.setting import applied, layout_of
from mechtv.tasks.prompts import Prompts
from mechtv.vectors.inject import declared_layout, hooked_at
from mechtv.vectors.site import Site
from mechtv.vectors.vector import TaskVector

Change = Callable[[Float[Tensor, "batch *feature"]], Float[Tensor, "batch *feature"] | None]
Read = Callable[[Tensor, Prompts], Tensor]


def last_residual(
    model: TransformerBridge,
    prompts: Prompts,
    vector: TaskVector | None = None,
    *,
    changes: Mapping[str, Change] | None = None,
) -> Float[Tensor, "batch d_model"]:
    """The residual stream behind the last block, at each row's last token.

    Args:
        vector: what the pass runs under; None for the plain model.
        changes: for hook points of blocks, such as `blocks.3.attn.v.hook_in`, a function of the
            activations at the rows' last tokens (row by row, behind the vector's edits): it gives
            what stands there instead, or None if it only looks. Gradients flow through.

    Raises:
        InvalidInput: if the vector does not fit the model, the model lacks a hook point, a change
            is to attention scores or patterns (which do not stand token by token, and which some
            families show after their use), or at a point that never fires.
    """
    changes = changes or {}
    points = {name: _token_point(model, name) for name in changes}
    fired = dict.fromkeys(changes, False)
    sites = [Site(layer=layer) for layer in sorted(set(map(_layer_of, changes)))]
    layout = layout_of(prompts, model)
    row = torch.arange(len(prompts))
    final = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
    kept: list[Tensor] = []
    with ExitStack() as stack:
        memory = stack.enter_context(steady(model))
        cut = cut_around(
            memory, model, prompts, vector, layout, sites=sites, learning=torch.is_grad_enabled()
        )
        columns = prompts.last if cut is None else prompts.last - cut.suffix.start
        inner = layout if cut is None else cut.suffix.layout(layout)
        stack.enter_context(declared_layout(model, inner))
        stack.enter_context(applied(vector, model))
        for name, point in points.items():
            change = partial(_noted, change=changes[name], name=name, fired=fired)
            hook = partial(_changed, change=change, row=row, column=columns)
            stack.enter_context(hooked_at(point, hook))
        if cut is not None:
            states = replay(model, cut.prefix)
            kept.append(states[row, columns.to(states.device)])
        else:
            keep = partial(_changed, change=kept.append, row=row, column=columns)
            stack.enter_context(hooked_at(_block_point(model, final), keep))
            pass_through(model, prompts, last_layer=model.cfg.n_layers - 1)
    _check_all_fired(fired)
    return kept[0]


def observe(
    model: TransformerBridge,
    prompts: Prompts,
    reads: Mapping[str, Read],
    vector: TaskVector | None = None,
) -> dict[str, Tensor]:
    """What stands at some hook points of blocks in one full pass, behind the vector's edits.

    Args:
        reads: for each hook point what is kept of its activation, such as `at_last`.

    Raises:
        InvalidInput: for no hook points, one that the model lacks, or a vector that does not fit.
    """
    if not reads:
        raise InvalidInput("There are no hook points to observe; give at least one.")
    points = {name: _block_point(model, name) for name in reads}
    found: dict[str, Tensor] = {}
    with ExitStack() as stack:
        stack.enter_context(declared_layout(model, layout_of(prompts, model)))
        stack.enter_context(applied(vector, model))
        for name, point in points.items():
            hook = partial(_read, found=found, name=name, read=reads[name], prompts=prompts)
            stack.enter_context(hooked_at(point, hook))
        pass_through(model, prompts, last_layer=max(map(_layer_of, reads)))
    _check_all_fired({name: name in found for name in reads})
    return found


def at_last(
    activation: Float[Tensor, "batch pos *feature"], prompts: Prompts
) -> Float[Tensor, "batch *feature"]:
    """The activation at each row's last token."""
    return activation[torch.arange(len(prompts)), prompts.last.to(activation.device)]


def from_last(
    pattern: Float[Tensor, "batch head query key"], prompts: Prompts
) -> Float[Tensor, "batch head key"]:
    """The attention that each row's last token pays, of an attention pattern."""
    return pattern[torch.arange(len(prompts)), :, prompts.last.to(pattern.device)]


def _block_point(model: TransformerBridge, name: str) -> HookPoint:
    point = model.get_hook_point(name) if re.match(r"blocks\.\d+\.", name) else None
    if point is None:
        raise InvalidInput(
            f"This model's blocks have no hook point {name!r}; model.hook_dict names them all."
        )
    return point


def _token_point(model: TransformerBridge, name: str) -> HookPoint:
    """A point at which each token has an activation of its own."""
    if name.endswith(("hook_pattern", "hook_attn_scores")):
        raise InvalidInput(
            f"{name!r} has no activation at a token that could be changed; change what queries, "
            "keys or values read instead, such as attn.v.hook_in."
        )
    return _block_point(model, name)


def _check_all_fired(fired: Mapping[str, bool]) -> None:
    silent = [name for name, did in fired.items() if not did]
    if silent:
        raise InvalidInput(f"{silent[0]} never fires in this model's pass; choose another point.")


def _noted(
    x: Float[Tensor, "batch *feature"], *, change: Change, name: str, fired: dict[str, bool]
) -> Float[Tensor, "batch *feature"] | None:
    fired[name] = True
    return change(x)


def _layer_of(name: str) -> int:
    return int(name.split(".")[1])


def _changed(
    activation: Float[Tensor, "batch pos *feature"],
    hook: HookPoint,
    *,
    change: Change,
    row: Int[Tensor, " batch"],
    column: Int[Tensor, " batch"],
) -> Float[Tensor, "batch pos *feature"] | None:
    flat = activation.flatten(0, 1)
    there = (row * activation.shape[1] + column).to(activation.device)
    after = change(flat.index_select(0, there))
    if after is None:
        return None
    return flat.index_copy(0, there, after.to(activation.dtype)).reshape(activation.shape)


def _read(
    activation: Tensor,
    hook: HookPoint,
    *,
    found: dict[str, Tensor],
    name: str,
    read: Read,
    prompts: Prompts,
) -> None:
    found[name] = read(activation, prompts)
