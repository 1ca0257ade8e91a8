"""The training loop: AdamW, early stopping on validation, the best vector kept."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from mechtv.errors import InvalidInput
from mechtv.forward.chunks import in_chunks
from mechtv.methods.objectives import Objective
from mechtv.progress import progress_bar
from mechtv.tasks.prompts import Prompts
from mechtv.vectors.vector import TaskVector

POOL = 8

Curve = list[dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The options of the loop; `learn` explains them."""

    epochs: int
    batch_size: int
    patience: int
    schedule: Literal["cosine", "constant"]
    weight_decay: float


def train(
    start: Sequence[Tensor],
    *,
    as_vector: Callable[[Sequence[Tensor]], TaskVector],
    training: Objective,
    validation: Objective,
    steps: Sequence[float],
    plan: Plan,
    rng: torch.Generator,
    title: str,
    show: bool | None,
) -> tuple[list[Tensor], Curve]:
    """Train the leaf tensors `start` in place.

    Args:
        as_vector: the task vector that the tensors make, differentiable in them.
        steps: AdamW's step for each tensor.

    Returns:
        The tensors at the epoch with the best validation score, detached, and the curve: one row an
        epoch, epoch 0 before training.

    Raises:
        InvalidInput: if a loss is no finite number.
    """
    groups = [{"params": [x], "lr": step} for x, step in zip(start, steps, strict=True)]
    optimizer = torch.optim.AdamW(groups, weight_decay=plan.weight_decay)
    n_batches = -(-len(training.prompts) // plan.batch_size)
    schedule = _schedule(optimizer, plan, n_batches)
    with ExitStack() as stack:
        stack.enter_context(training.prepared(as_vector(start), show))
        stack.enter_context(validation.prepared(as_vector(start), show))
        bar = stack.enter_context(
            progress_bar(title=title, total=plan.epochs * n_batches, show=show)
        )
        curve = [{"epoch": 0.0, "step": 0.0} | validation.score(as_vector(start))]
        best, best_epoch = _copy(start), 0
        for epoch in range(1, plan.epochs + 1):
            losses = []
            for rows in like_lengths(training.prompts, plan.batch_size, rng):
                losses.append(_step(as_vector, start, training, rows, optimizer) * len(rows))
                schedule.step()
                bar.update()
            loss = sum(losses) / len(training.prompts)
            point = {"epoch": float(epoch), "step": float(epoch * n_batches), "train_loss": loss}
            curve.append(point | validation.score(as_vector(start)))
            if _rank(curve[-1]) > _rank(curve[best_epoch]):
                best, best_epoch = _copy(start), epoch
            if epoch - best_epoch >= plan.patience:
                break
    return best, curve


def like_lengths(
    prompts: Prompts, batch_size: int, rng: torch.Generator
) -> list[Int[Tensor, " row"]]:
    """All rows once, in random batches of rows of like length, in random order.

    Rows are shuffled, sorted by length within pools of eight batches, and cut: padding costs time.
    """
    answers = torch.tensor([len(answer) for answer in prompts.answers])
    lengths = answers * (int(prompts.lengths.max()) + 1) + prompts.lengths
    batches: list[Tensor] = []
    for pool in torch.randperm(len(prompts), generator=rng).split(POOL * batch_size):
        batches += pool[lengths[pool].argsort(stable=True)].split(batch_size)
    order = torch.randperm(len(batches), generator=rng)
    return [batches[index] for index in order.tolist()]


def _step(
    as_vector: Callable[[Sequence[Tensor]], TaskVector],
    start: Sequence[Tensor],
    training: Objective,
    rows: Tensor,
    optimizer: torch.optim.Optimizer,
) -> float:
    """One step on the mean loss of some rows; in parts where memory runs out for all at once."""

    def backward(some: Tensor) -> float:
        before = [None if x.grad is None else x.grad.clone() for x in start]
        try:
            loss = training.loss(as_vector(start), some).sum() / len(rows)
            loss.backward()
        except (RuntimeError, MemoryError):
            # a pass that did not end may have left some of its gradients
            for x, gradient in zip(start, before, strict=True):
                x.grad = gradient
            raise
        return float(loss.detach())

    optimizer.zero_grad(set_to_none=True)
    value = sum(loss for _, loss in in_chunks(rows, len(rows), backward))
    if not math.isfinite(value):
        raise InvalidInput(
            f"Training diverged: the loss became {value}; use a smaller step_size, or float32."
        )
    optimizer.step()
    return value


def _schedule(optimizer: torch.optim.Optimizer, plan: Plan, n_batches: int) -> LRScheduler:
    if plan.schedule == "constant":
        return torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    return CosineAnnealingLR(optimizer, T_max=plan.epochs * n_batches)


def _rank(point: dict[str, float]) -> tuple[float, float]:
    """Accuracy decides where there is one; the loss decides between equals."""
    return point.get("validation_accuracy", 0.0), -point["validation_loss"]


def _copy(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]
