"""Calibration of I2CL's scales: a short, noisy training on the demonstrations themselves.

Li et al. 2025, *Implicit In-context Learning*; AdamW, a linear warm-up, then half a cosine, with
Gaussian noise on every edited activation (docs/methods.md). There is no validation: the
demonstrations are all the data that the method sees.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from mechtv.errors import InvalidInput
from mechtv.methods.objectives import Objective
from mechtv.methods.ranges import check_at_least, check_not_negative, check_positive
from mechtv.progress import progress_bar
from mechtv.seeds import torch_rng
from mechtv.vectors.card import Card
from mechtv.vectors.edits import Affine, Edit
from mechtv.vectors.vector import TaskVector

Curve = list[dict[str, float]]
_NO_CARD = Card(method="i2cl")


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The options of the training; `extract_i2cl` explains them.

    Raises:
        InvalidInput: for a value outside its range.
    """

    epochs: int
    batch_size: int
    step_size: float
    weight_decay: float
    warm_up: float
    noise: float

    def __post_init__(self) -> None:
        check_at_least(self, 1, "epochs", "batch_size")
        check_positive(self, "step_size", "0.01 suits most models")
        check_not_negative(self, "weight_decay", "0.001 suits most models")
        check_not_negative(self, "noise", "0.001 suits most models")
        if not 0 <= self.warm_up < 1:
            raise InvalidInput(
                f"warm_up={self.warm_up} is no share of the steps; use 0 or more, below 1."
            )

    def steps_an_epoch(self, n_examples: int) -> int:
        """How many batches make an epoch: whole ones only, but at least one."""
        return max(1, n_examples // self.batch_size)


def train_scales(
    start: Sequence[Float[Tensor, " site"]],
    *,
    as_edits: Callable[..., tuple[Edit, ...]],
    training: Objective,
    plan: Calibration,
    seed: int,
    name: str,
    show: bool | None,
) -> tuple[list[Tensor], Curve]:
    """Train scales by the loss of the vector that they make.

    Args:
        as_edits: the `Affine` edits that scales make, differentiable in them; it takes them in the
            order of `start`.
        name: of the task. Batches are drawn without replacement, each independently of the others.

    Returns:
        The scales after the last step, and the curve: one row an epoch, with the mean loss of its
        steps, noise included.

    Raises:
        InvalidInput: if a loss is no finite number.
    """
    scales = [x.clone().requires_grad_() for x in start]
    batches = torch_rng(seed, f"calibration batches of {name}")
    noise = torch_rng(seed, f"calibration noise of {name}")
    n_examples = len(training.prompts)
    an_epoch = plan.steps_an_epoch(n_examples)
    n_steps = plan.epochs * an_epoch
    optimizer = torch.optim.AdamW(scales, lr=plan.step_size, weight_decay=plan.weight_decay)
    schedule = LambdaLR(optimizer, lambda step: rate(step, n_steps, plan.warm_up))
    losses = []
    with progress_bar(title=f"calibrate {name}", total=n_steps, show=show) as bar:
        for _ in range(n_steps):
            rows = torch.randperm(n_examples, generator=batches)[: plan.batch_size]
            edits = noisy(as_edits(*scales), plan.noise, noise)
            vector = TaskVector(edits=edits, card=_NO_CARD)
            losses.append(_step(training.loss(vector, rows).mean(), optimizer))
            schedule.step()
            bar.update()
    return [x.detach() for x in scales], _by_epoch(losses, an_epoch)


def _by_epoch(losses: Sequence[float], an_epoch: int) -> Curve:
    ends = range(an_epoch, len(losses) + 1, an_epoch)
    return [
        {
            "epoch": float(epoch),
            "step": float(end),
            "train_loss": fmean(losses[end - an_epoch : end]),
        }
        for epoch, end in enumerate(ends, start=1)
    ]


def rate(step: int, n_steps: int, warm_up: float) -> float:
    """The share of the step size that step `step`, counted from 0, takes.

    It rises linearly to 1 over the first `warm_up` share of the steps, none of which stands still,
    and falls along half a cosine to 0, which it would reach just after the last step.
    """
    n_warm = round(warm_up * n_steps)
    if step < n_warm:
        return (step + 1) / (n_warm + 1)
    return (1 + math.cos(math.pi * (step - n_warm) / (n_steps - n_warm))) / 2


def noisy(edits: Sequence[Edit], noise: float, rng: torch.Generator) -> tuple[Edit, ...]:
    """`Affine` edits with noise after each of them."""
    if noise == 0:
        return tuple(edits)
    return tuple(
        replace(edit, operation=_Noisy(**edit.operation.tensors(), noise=noise, rng=rng))
        for edit in edits
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Noisy(Affine):
    """h <- a + noise * |a| * N(0, 1) for each component, where a = scale * h + value.

    Drawn on the CPU, so that devices agree. The size |a| of the noise takes no gradient.
    """

    noise: float
    rng: torch.Generator

    def __call__(
        self, activation: Float[Tensor, "selected *feature"], slot: Int[Tensor, " selected"]
    ) -> Float[Tensor, "selected *feature"]:
        """Give scale * h + value + noise."""
        after = super().__call__(activation, slot)
        size: Tensor = self.noise * after.detach().norm(dim=-1, keepdim=True)
        drawn = torch.randn(after.shape, generator=self.rng, dtype=after.dtype)
        return after + size * drawn.to(after.device)


def _step(loss: Float[Tensor, ""], optimizer: torch.optim.Optimizer) -> float:
    value = float(loss.detach())
    if not math.isfinite(value):
        raise InvalidInput(
            f"Calibration diverged: the loss became {value}; use a smaller step_size, or float32."
        )
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return value
