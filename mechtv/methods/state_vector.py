"""State vectors: attention outputs at the demonstrations' separators, written into layers 0 to L.

Li et al. 2024, *In-Context Learning State Vector with Inner and Momentum Optimization*; the choices
that the paper leaves open are those of the authors' code (docs/methods.md). The state after i
demonstrations is what the heads put out (before W_O) at the token just before the next answer, in
layers 0 to L. Later states have seen more demonstrations; averaging the last ones (`inner`), and
going on in the direction in which they change (`momentum`), makes a better vector than the last one
alone (`none`). Use hidden states or function vectors where one layer is to carry the task.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import index
from typing import Literal

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.forward.memory import steady
from mechtv.forward.run import capture, in_batches, wide
from mechtv.forward.setting import device_of
from mechtv.methods.cards import card_for
from mechtv.methods.ranges import check_choices
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import Task
from mechtv.vectors.edits import Edit, Replace
from mechtv.vectors.inject import hook_point
from mechtv.vectors.site import Site
from mechtv.vectors.vector import TaskVector

Optimisation = Literal["inner", "momentum", "none"]


@dataclass(frozen=True, kw_only=True)
class StateVectorSettings:
    """Every option of `extract_state_vector` but the seed; see there.

    Raises:
        InvalidInput: for a value outside its range, or fewer shots than the optimisation needs.
    """

    layers: int
    shots: int
    optimisation: Optimisation
    window: int
    weights: tuple[float, ...]
    n: int

    def __post_init__(self) -> None:
        check_choices(self, optimisation=Optimisation)
        if self.window < 1:
            raise InvalidInput(f"window={self.window} averages no states; use 1 or more.")
        total = sum(self.weights)
        if not math.isfinite(total) or total == 0:
            raise InvalidInput(
                f"weights={self.weights} sum to {total}, but they are divided by their sum; give "
                "one or more numbers with a finite sum other than 0."
            )
        if self.shots < self.least_shots:
            raise InvalidInput(
                f"shots={self.shots} are too few for optimisation={self.optimisation!r} with "
                f"{self._asks}; use {self.least_shots} or more."
            )

    @property
    def least_shots(self) -> int:
        """How many demonstrations are needed: the query's own state is one more."""
        least = {"inner": self.window - 1, "momentum": len(self.weights), "none": 1}
        return max(1, least[self.optimisation])

    @property
    def _asks(self) -> str:
        asks = {"inner": f"window={self.window}", "momentum": f"{len(self.weights)} weights"}
        return asks.get(self.optimisation, "any settings")


def extract_state_vector(
    model: TransformerBridge,
    task: Task,
    layers: int | None = None,
    *,
    shots: int = 10,
    optimisation: Optimisation = "inner",
    window: int = 7,
    weights: Sequence[float] = (1.0, 2.0, 4.0, 8.0, 16.0, 0.0),
    n: int = 1,
    seed: int = 0,
    progress: bool | None = None,
) -> TaskVector:
    """The attention outputs of a k-shot prompt with a dummy query, optimised over its separators.

    Args:
        layers: the last block, counted from 0: it and all blocks before it are read and written;
            the middle block if None. Choose it on `validation`.
        shots: demonstrations in each prompt.
        optimisation: `inner`, `momentum` (see the functions of these names) or `none`, which is the
            state at the query's last token.
        window: for `inner`, how many of the last states are averaged.
        weights: for `momentum`, the weights of the last changes from state to state.
        n: how many prompts are averaged, each with a pass of its own; the authors take 1. Their
            queries are training examples, none of which is among its own demonstrations. Fewer if
            the training split is smaller.

    Returns:
        A vector that replaces `z` at the last token of each block from 0 to `layers`; each value is
        `head d_head`.

    Raises:
        InvalidInput: for a value outside its range, fewer shots than the optimisation needs, a
            layer that the model lacks, a pool that is too small, or a prompt longer than the
            context.
    """
    settings = StateVectorSettings(
        layers=model.cfg.n_layers // 2 if layers is None else index(layers),
        shots=shots,
        optimisation=optimisation,
        window=window,
        weights=tuple(map(float, weights)),
        n=min(n, len(task.splits(seed).train)),
    )
    hook_point(model, Site(component="z", layer=settings.layers))
    prompts = Prompts.of(model, task, split="train", shots=shots, n=settings.n, seed=seed)
    with torch.no_grad(), steady(model):
        states = in_batches(
            prompts,
            lambda prompt: _states(model, prompt, settings.layers),
            batch_size=1,  # separators lie at other positions in every prompt
            title=f"{shots}-shot states of {task.name}",
            show=progress,
        )
    # every optimisation is linear in the states, so the prompts can be averaged first
    values = _optimised(wide(states).mean(dim=0), settings)
    edits = tuple(
        Edit(site=Site(component="z", layer=layer), operation=Replace(value=value))
        for layer, value in enumerate(values)
    )
    card = card_for(model, task, method="state_vector", settings=asdict(settings), seed=seed)
    return TaskVector(edits=edits, card=card)


def inner(states: Float[Tensor, "state *feature"], window: int) -> Float[Tensor, "*feature"]:
    """The mean of the last `window` states (inner optimisation)."""
    return states[-window:].mean(dim=0)


def momentum(
    states: Float[Tensor, "state *feature"], weights: Sequence[float]
) -> Float[Tensor, "*feature"]:
    """The mean of the last states, moved along their last changes (momentum optimisation).

    With m weights w, B the `inner` mean of the last m + 1 states V, and d_1 ... d_m the last m
    changes in the sequence of all demonstrations' states followed by B, it is
    B + sum_i w_i d_i / sum_i w_i.
    """
    base = inner(states, len(weights) + 1)
    changes = torch.cat([states[:-1], base[None]]).diff(dim=0)[-len(weights) :]
    shares = torch.tensor(weights, dtype=states.dtype, device=states.device) / sum(weights)
    return base + einsum(shares, changes, "change, change ... -> ...")


def _optimised(
    states: Float[Tensor, "state *feature"], settings: StateVectorSettings
) -> Float[Tensor, "*feature"]:
    if settings.optimisation == "inner":
        return inner(states, settings.window)
    if settings.optimisation == "momentum":
        return momentum(states, settings.weights)
    return states[-1]


def _states(
    model: TransformerBridge, prompt: Prompts, last_layer: int
) -> Float[Tensor, "1 state layer head d_head"]:
    """One prompt's states: after each demonstration's query, then after the query itself."""
    separators = prompt.separators[0] - prompt.last[0] - 1
    positions = (*separators.tolist(), -1)
    sites = [
        Site(component="z", layer=layer, positions=positions) for layer in range(last_layer + 1)
    ]
    taken = capture(model, prompt, sites)
    return torch.stack([taken[site].to(device_of(model)) for site in sites], dim=2)
