"""Every method by name, in one form, for whoever runs them all. A new method is one line here."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import UnknownName
from mechtv.methods.function_vector import extract_function_vector
from mechtv.methods.head_effects import measure_head_effects
from mechtv.methods.hidden_state import extract_hidden_state
from mechtv.methods.i2cl import extract_i2cl
from mechtv.methods.learned import learn
from mechtv.methods.linear import fit_linear
from mechtv.methods.state_vector import extract_state_vector
from mechtv.tasks.task import Task
from mechtv.vectors.vector import TaskVector

SET_BY_CALLER = ("seed", "progress", "layer", "layers")


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to obtain a vector.

    Args:
        make: takes a model, a task, a layer (if it `has_layer`) and options.
        has_layer: whether it is for one layer; else it is for all at once.
        shared: from a model, a task and options: what is costly and the same at every layer, as
            further options.
    """

    make: Callable[..., TaskVector]
    has_layer: bool = True
    shared: Callable[..., dict[str, Any]] | None = None


def _head_effects(model: TransformerBridge, task: Task, **options: Any) -> dict[str, Any]:
    if "effects" in options or isinstance(options.get("heads"), Sequence):
        return {}
    known = ("shots", "n", "n_shuffled", "seed", "progress")
    own = {name: value for name, value in options.items() if name in known}
    return {"effects": measure_head_effects(model, task, **own)}


METHODS: Mapping[str, Method] = {
    "hidden_state": Method(make=extract_hidden_state),
    "function_vector": Method(make=extract_function_vector, shared=_head_effects),
    "state_vector": Method(make=extract_state_vector),
    "i2cl": Method(make=extract_i2cl, has_layer=False),
    "linear": Method(make=fit_linear),
    "learned": Method(make=learn),
    "learned-dntp": Method(make=partial(learn, objective="dntp")),
}


def method_named(name: str) -> Method:
    """A method by its name.

    Raises:
        UnknownName: if there is none of that name.
    """
    if name not in METHODS:
        raise UnknownName("method", name, METHODS)
    return METHODS[name]


def takes(name: str, option: str) -> bool:
    """Whether a method has an option of that name.

    Raises:
        UnknownName: if there is no such method.
    """
    return option in signature(method_named(name).make).parameters


def check_options(name: str, options: Mapping[str, Any], also_set: Collection[str] = ()) -> None:
    """Refuse options that a method does not have, or that its caller sets for it.

    Args:
        also_set: options beside the seed, the bar and the layer that the caller sets.

    Raises:
        UnknownName: for the first such option.
    """
    make = method_named(name).make
    fixed = make.keywords if isinstance(make, partial) else {}
    taken = {"model", "task", *SET_BY_CALLER, *also_set, *fixed}
    parameters = signature(make).parameters.values()
    known = [p.name for p in parameters if p.name not in taken and p.kind != p.VAR_KEYWORD]
    open_ended = any(p.kind == p.VAR_KEYWORD for p in parameters)
    for option in options:
        if option in taken or not (option in known or open_ended):
            raise UnknownName(f"option of {name}", option, known)
