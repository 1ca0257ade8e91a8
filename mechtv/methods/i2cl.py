"""Implicit in-context learning: demonstrations as vectors mixed into every layer's outputs.

Li et al. 2025, *Implicit In-context Learning* (docs/methods.md). Each demonstration is read by
itself; the mean of its attention and MLP outputs at its last token is the context vector v of a
(layer, component). A zero-shot prompt then runs with a <- beta * a + lambda * v at every layer and
token of it. The few betas and lambdas are calibrated on the same demonstrations. It edits the whole
pass, so every pass under it is a full one; use another method where speed matters.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.forward.memory import steady
from mechtv.forward.run import capture, in_batches, wide
from mechtv.forward.setting import device_of
from mechtv.methods.calibration import Calibration, Curve, train_scales
from mechtv.methods.cards import card_for
from mechtv.methods.frozen import frozen
from mechtv.methods.objectives import Answer
from mechtv.tasks.chat import template_for
from mechtv.tasks.example import Example
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import Task
from mechtv.vectors.edits import Affine, Edit
from mechtv.vectors.inject import hook_point
from mechtv.vectors.site import Component, Site
from mechtv.vectors.vector import TaskVector

COMPONENTS: tuple[Component, ...] = ("attn_out", "mlp_out")


def extract_i2cl(
    model: TransformerBridge,
    task: Task,
    *,
    shots: int = 10,
    context_scale: float = 0.1,
    activation_scale: float = 1.0,
    calibrate: bool = True,
    epochs: int = 100,
    batch_size: int = 2,
    step_size: float = 1e-2,
    weight_decay: float = 1e-3,
    warm_up: float = 0.05,
    noise: float = 1e-3,
    seed: int = 0,
    progress: bool | None = None,
) -> TaskVector:
    """Context vectors of the task's one fixed set of demonstrations, and their calibrated scales.

    Calibration minimises -log p(answer), over the full vocabulary, of the demonstrations' queries
    alone under the vector; an answer of several tokens counts by its mean token log-probability.
    The model's weights, flags, gradients and mode stay as they are; the global random state is
    neither read nor changed.

    Args:
        shots: demonstrations, balanced over the labels.
        context_scale: lambda, what the context vectors are multiplied by at the start.
        activation_scale: beta, what the model's own activations are multiplied by at the start.
        calibrate: whether lambda and beta of each (layer, component) are trained from there.
        epochs: each has shots // `batch_size` steps, and at least one.
        batch_size: demonstrations in a step, drawn anew for each; all if there are fewer.
        step_size: AdamW's largest step; `weight_decay` its decay.
        warm_up: the share of the steps over which the step rises; then it falls to 0 along half a
            cosine.
        noise: in training, every component of an edited activation gets Gaussian noise of this
            standard deviation times the activation's norm.
        seed: fixes the demonstrations, the batches and the noise; equal seeds give equal bits.

    Returns:
        A vector with an `Affine` edit at `attn_out` and at `mlp_out` of every layer, on all prompt
        tokens; values are `d_model` wide. Its card records every lambda and beta, and
        `.training_curve()` has one row an epoch if it was calibrated.

    Raises:
        InvalidInput: for values outside their ranges, a model without one of the components, or
            demonstrations too few or too long.
    """
    plan = Calibration(
        epochs=epochs,
        batch_size=batch_size,
        step_size=step_size,
        weight_decay=weight_decay,
        warm_up=warm_up,
        noise=noise,
    )
    _check(shots, context_scale, activation_scale)
    sites = _sites(model)
    shown = task.demonstrations(None, shots, seed=seed)
    with frozen(model), steady(model):
        vectors = _context_vectors(model, task, shown, sites, progress)
        start = (context_scale, activation_scale)
        scales = [torch.full_like(vectors[:, 0], scale) for scale in start]
        curve: Curve = []
        if calibrate:
            queries = Prompts.from_examples(model, task, shown, [()] * shots)
            scales, curve = train_scales(
                scales,
                as_edits=partial(_edits, sites, vectors),
                training=Answer(model, queries),
                plan=plan,
                seed=seed,
                name=task.name,
                show=progress,
            )
    settings = {
        "shots": shots,
        "context_scale": context_scale,
        "activation_scale": activation_scale,
        "calibrate": calibrate,
    }
    found = {"lambda": _by_component(scales[0]), "beta": _by_component(scales[1])}
    card = card_for(
        model,
        task,
        method="i2cl",
        settings=settings | asdict(plan) | {"scales": found},
        seed=seed,
        curve=curve,
    )
    return TaskVector(edits=_edits(sites, vectors, *scales), card=card)


def _check(shots: int, context_scale: float, activation_scale: float) -> None:
    if shots < 1:
        raise InvalidInput(
            f"shots={shots} leaves nothing to extract; use 1 or more demonstrations."
        )
    scales = {"context_scale": context_scale, "activation_scale": activation_scale}
    for name, value in scales.items():
        if not math.isfinite(value):
            raise InvalidInput(f"{name}={value} is not finite; use a number such as 0.1 or 1.")


def _sites(model: TransformerBridge) -> tuple[Site, ...]:
    """Both components of every layer, layer by layer."""
    sites = tuple(
        Site(component=component, layer=layer, positions="all")
        for layer in range(model.cfg.n_layers)
        for component in COMPONENTS
    )
    for site in sites:
        hook_point(model, site)
    return sites


def _context_vectors(
    model: TransformerBridge,
    task: Task,
    shown: Sequence[Example],
    sites: Sequence[Site],
    show: bool | None,
) -> Float[Tensor, "site d_model"]:
    """At each site the mean over demonstrations of the activation at their last token, each alone.

    At least float32, whatever the model's data type.
    """
    last = [Site(component=site.component, layer=site.layer) for site in sites]

    def read(batch: Prompts) -> Float[Tensor, "batch site d_model"]:
        taken = capture(model, batch, last)
        return torch.stack([taken[site][:, 0].to(device_of(model)) for site in last], dim=1)

    template = template_for(model, task.template)
    texts = [template.demonstration(example) for example in shown]
    with torch.no_grad():
        states = in_batches(
            Prompts.from_texts(model, texts),
            read,
            title=f"demonstrations of {task.name}",
            show=show,
        )
        return wide(states).mean(dim=0)


def _edits(
    sites: Sequence[Site],
    vectors: Float[Tensor, "site d_model"],
    context: Float[Tensor, " site"],
    activation: Float[Tensor, " site"],
) -> tuple[Edit, ...]:
    """At each site a <- activation * a + context * vector."""
    values = (context[:, None] * vectors).unbind()
    return tuple(
        Edit(site=site, operation=Affine(scale=scale, value=value))
        for site, scale, value in zip(sites, activation.unbind(), values, strict=True)
    )


def _by_component(scales: Float[Tensor, " site"]) -> dict[str, list[float]]:
    """The scales of each component, layer by layer."""
    apart = rearrange(scales, "(layer component) -> component layer", component=len(COMPONENTS))
    return dict(zip(COMPONENTS, apart.tolist(), strict=True))
