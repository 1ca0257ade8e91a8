"""Learned task vectors: trained by gradient descent at any layers and positions, model frozen.

*Task Vectors, Learned Not Extracted* (arXiv 2509.24169), section 3, with the step scaled to the
size of the residual stream (docs/methods.md). Use an extractor instead when there are no answers
and no in-context reference to train towards.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.evaluation.dntp import Over
from mechtv.forward.setting import device_of
from mechtv.methods.cards import card_for
from mechtv.methods.frozen import frozen
from mechtv.methods.layers import as_layers
from mechtv.methods.norms import residual_norms
from mechtv.methods.objectives import Answer, MatchDistribution, MatchState, Objective
from mechtv.methods.ranges import (
    check_at_least,
    check_choices,
    check_not_negative,
    check_positive,
)
from mechtv.methods.training import Plan, train
from mechtv.seeds import torch_rng
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import SplitName, Task
from mechtv.vectors.card import Card
from mechtv.vectors.edits import Add, Edit
from mechtv.vectors.inject import hook_point
from mechtv.vectors.site import Component, Positions, Site, checked_positions
from mechtv.vectors.vector import TaskVector

ObjectiveName = Literal["answer", "dntp", "state"]
Schedule = Literal["cosine", "constant"]


@dataclass(frozen=True, kw_only=True)
class LearnSettings:
    """Every option of `learn`; see there.

    Raises:
        InvalidInput: for a value outside its range.
    """

    layers: tuple[int, ...]
    positions: Positions
    component: Component
    objective: ObjectiveName
    shots: int
    icl_shots: int
    over: Over
    state_layer: int
    step_size: float
    weight_decay: float
    init: float
    epochs: int
    batch_size: int
    patience: int
    schedule: Schedule
    n_train: int | None
    n_validation: int | None

    def __post_init__(self) -> None:
        check_choices(self, objective=ObjectiveName, schedule=Schedule, over=Over)
        check_at_least(self, 1, "epochs", "batch_size", "patience")
        check_at_least(self, 0, "shots")
        check_positive(self, "step_size", "0.2 suits most models")
        check_not_negative(self, "weight_decay", "the paper's is 0.01")
        if self.objective != "answer" and self.icl_shots < 1:
            raise InvalidInput(
                f"objective={self.objective!r} matches an in-context run; "
                f"icl_shots={self.icl_shots} must be 1 or more."
            )
        if self.objective == "state" and self.state_layer < max(self.layers):
            raise InvalidInput(
                f"state_layer={self.state_layer} comes before layer={max(self.layers)}, so the "
                "vector cannot change that state; use a later one."
            )

    @property
    def sites(self) -> tuple[Site, ...]:
        """One site a layer."""
        return tuple(
            Site(component=self.component, layer=layer, positions=self.positions)
            for layer in self.layers
        )


def learn(
    model: TransformerBridge,
    task: Task,
    layer: int | Sequence[int] | None = None,
    *,
    positions: int | Sequence[int] | Literal["all"] = -1,
    component: Component = "resid_pre",
    objective: ObjectiveName = "answer",
    shots: int = 0,
    icl_shots: int = 8,
    over: Over = "vocabulary",
    state_layer: int | None = None,
    step_size: float = 0.2,
    weight_decay: float = 0.01,
    init: float = 0.1,
    epochs: int = 10,
    batch_size: int = 16,
    patience: int = 3,
    schedule: Schedule = "cosine",
    n_train: int | None = None,
    n_validation: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> TaskVector:
    """Train an additive vector, one theta for each (layer, position), and keep the best.

    AdamW minimises the objective over the task's training split; after each epoch the vector is
    scored on the validation split, and the best one is returned. The model's weights, flags,
    gradients and mode stay as they are; the global random state is neither read nor changed.

    Args:
        layer: one block or several, counted from 0; the middle one if None.
        positions: where theta is added: numbers counted from each row's last token (-1), or `"all"`
            (one theta for all positions).
        component: the site's component; the input of the block by default.
        objective: `answer` minimises -log p(answer); `dntp` KL from the next-token distribution
            with `icl_shots` demonstrations; `state` the squared distance to that run's residual
            stream after block `state_layer` (the last one if None).
        shots: demonstrations in the prompts that the vector is trained on; 0 is zero-shot.
        over: for `dntp`, the tokens compared: the whole `vocabulary` or the `labels`.
        step_size: AdamW's step in units of the residual stream: the step is `step_size` x (mean
            residual norm at the position / sqrt(d_model)).
        weight_decay: AdamW's decay: each step takes `step_size` x `weight_decay` of theta away.
        init: the half-width of theta's uniform start, in absolute units.
        epochs: at most this many passes over the training split; `patience` ends training after so
            many epochs without a better validation score.
        schedule: `cosine` lets the step fall to 0 over `epochs`; `constant` keeps it.
        n_train, n_validation: how many queries; the whole splits (at most 600 and 400) if None.
        seed: fixes splits, demonstrations, start and batch order; equal seeds give equal bits.
        progress: a bar; by default in terminals and notebooks only.

    Returns:
        The vector; `.training_curve()` has one row an epoch. Its card records the settings, the
        residual norms and the steps.

    Raises:
        InvalidInput: for values outside their ranges, a layer that the model lacks, or prompts too
            short for the positions or too long for the context.
    """
    n_layers = model.cfg.n_layers
    layers = as_layers(n_layers // 2 if layer is None else layer)
    settings = LearnSettings(
        layers=layers,
        positions=checked_positions(positions),
        component=component,
        objective=objective,
        shots=shots,
        icl_shots=icl_shots,
        over=over,
        state_layer=n_layers - 1 if state_layer is None else state_layer,
        step_size=step_size,
        weight_decay=weight_decay,
        init=init,
        epochs=epochs,
        batch_size=batch_size,
        patience=patience,
        schedule=schedule,
        n_train=n_train,
        n_validation=n_validation,
    )
    for site in (*settings.sites, Site(layer=settings.state_layer)):
        hook_point(model, site)
    with frozen(model):
        training = _objective(model, task, settings, "train", n_train, seed)
        validation = _objective(model, task, settings, "validation", n_validation, seed)
        norms = residual_norms(model, training.prompts, settings.sites)
        rng = torch_rng(seed, f"learn {task.name}")
        scales = [
            _scale(model, site, norm) for site, norm in zip(settings.sites, norms, strict=True)
        ]
        start = [
            _start(model, site, scale, init, rng)
            for site, scale in zip(settings.sites, scales, strict=True)
        ]
        best, curve = train(
            start,
            as_vector=lambda units: TaskVector(
                edits=_edits(settings, units, scales), card=_NO_CARD
            ),
            training=training,
            validation=validation,
            steps=[step_size] * len(start),
            plan=Plan(
                epochs=epochs,
                batch_size=batch_size,
                patience=patience,
                schedule=schedule,
                weight_decay=weight_decay,
            ),
            rng=rng,
            title=f"learn {task.name} at layer {', '.join(map(str, layers))}",
            show=progress,
        )
        edits = _edits(settings, best, scales)
    measured = {
        "n_train": len(training.prompts),
        "n_validation": len(validation.prompts),
        "residual_norms": norms,
        "steps": [(step_size * scale).flatten().tolist() for scale in scales],
    }
    card = card_for(
        model, task, method="learned", settings=asdict(settings) | measured, seed=seed, curve=curve
    )
    return TaskVector(edits=edits, card=card)


_NO_CARD = Card(method="learned")


def _objective(
    model: TransformerBridge,
    task: Task,
    settings: LearnSettings,
    split: SplitName,
    n: int | None,
    seed: int,
) -> Objective:
    def prompts(shots: int) -> Prompts:
        return Prompts.of(model, task, split=split, shots=shots, n=n, seed=seed)

    plain = prompts(settings.shots)
    if settings.objective == "answer":
        return Answer(model, plain)
    in_context = prompts(settings.icl_shots)
    if settings.objective == "dntp":
        return MatchDistribution(model, plain, in_context, task, settings.over)
    return MatchState(model, plain, in_context, settings.state_layer)


def _feature(model: TransformerBridge, site: Site) -> tuple[int, ...]:
    cfg = model.cfg
    return (cfg.n_heads, cfg.d_head) if site.component == "z" else (cfg.d_model,)


def _scale(
    model: TransformerBridge, site: Site, norms: Sequence[float]
) -> Float[Tensor, "*slot_ones"]:
    """The size of one component of the stream at each position: mean norm / sqrt(width)."""
    feature = _feature(model, site)
    dtype = torch.float64 if model.cfg.dtype == torch.float64 else torch.float32
    sizes = torch.tensor(norms, dtype=dtype) / math.sqrt(math.prod(feature))
    ones = [1] * len(feature)
    shape = ones if site.positions == "all" else [len(norms), *ones]
    return sizes.reshape(shape).to(device_of(model))


def _start(
    model: TransformerBridge,
    site: Site,
    scale: Float[Tensor, "*slot_ones"],
    init: float,
    rng: torch.Generator,
) -> Float[Tensor, "*slot_feature"]:
    """Theta ~ U(-init, init) in units of `scale`: one for each position, or one shared by all.

    Training in these units makes the step, the weight decay and AdamW's epsilon independent of how
    large the model's stream is.
    """
    feature = _feature(model, site)
    shape = feature if site.positions == "all" else (len(site.positions), *feature)
    theta = (2 * torch.rand(shape, generator=rng, dtype=scale.dtype) - 1) * init
    return (theta.to(scale.device) / scale).requires_grad_()


def _edits(
    settings: LearnSettings, units: Sequence[Tensor], scales: Sequence[Tensor]
) -> tuple[Edit, ...]:
    return tuple(
        Edit(site=site, operation=Add(value=unit * scale))
        for site, unit, scale in zip(settings.sites, units, scales, strict=True)
    )
