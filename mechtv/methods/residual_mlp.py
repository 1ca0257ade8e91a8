"""A residual MLP trained from one set of states to the changes that belong to them."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mechtv.errors import InvalidInput
from mechtv.progress import progress_bar
from mechtv.seeds import torch_rng
from mechtv.vectors.edits import ResidualMLP

Curve = list[dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The options of the training; `fit_mapping` explains and checks them."""

    depth: int
    epochs: int
    step_size: float
    weight_decay: float
    batch_size: int


def train_mlp(
    h: Float[Tensor, "query d_model"],
    y: Float[Tensor, "query d_model"],
    plan: Plan,
    *,
    seed: int,
    progress: bool | None = None,
) -> tuple[ResidualMLP, Curve]:
    """The MLP that gives changes `y` for states `h`, and its curve; gradients must be on."""
    h, y = (x.detach().to(torch.float32, copy=True) for x in (h, y))
    start = _start(h, y, plan.depth, seed)
    leaves = [start.weights.requires_grad_(), start.biases.requires_grad_()]
    optimizer = torch.optim.AdamW(leaves, lr=plan.step_size, weight_decay=plan.weight_decay)
    rng = torch_rng(seed, "batches of a mapping")
    n_batches = -(-len(h) // plan.batch_size)
    curve = [_point(0, 0, start, h, y)]
    title, total = f"MLP of {plan.depth} layers", plan.epochs * n_batches
    with progress_bar(title=title, total=total, show=progress) as bar:
        for epoch in range(1, plan.epochs + 1):
            for rows in torch.randperm(len(h), generator=rng).split(plan.batch_size):
                some = rows.to(h.device)
                optimizer.zero_grad(set_to_none=True)
                _loss(start, h[some], y[some]).backward()
                optimizer.step()
                bar.update()
            curve.append(_point(epoch, epoch * n_batches, start, h, y))
    return _detached(start), curve


def _start(
    h: Float[Tensor, "query d_model"], y: Float[Tensor, "query d_model"], depth: int, seed: int
) -> ResidualMLP:
    """The constant map: small random layers, and a last one that gives the mean change.

    That change is not left to AdamW, which moves a number by about a step at a time and so would
    not get there in the paper's few steps.
    """
    d_model = h.shape[1]
    rng = torch_rng(seed, f"start of a mapping of {depth} layers")
    weights = torch.randn(depth, d_model, d_model, generator=rng) / math.sqrt(d_model * depth)
    weights[-1] = 0
    biases = torch.zeros(depth, d_model)
    centre, scale, gain = h.mean(dim=0), _size(h - h.mean(dim=0)), _size(y - y.mean(dim=0))
    biases[-1] = (y.mean(dim=0) / gain).cpu()
    return ResidualMLP(
        weights=weights.to(h.device),
        biases=biases.to(h.device),
        centre=centre,
        scale=scale,
        gain=gain,
    )


def _size(x: Float[Tensor, "query d_model"]) -> Float[Tensor, ""]:
    """The root mean square component; 1 where all are 0."""
    size = x.square().mean().sqrt()
    return torch.where(size > 0, size, torch.ones_like(size))


def _loss(
    operation: ResidualMLP, h: Float[Tensor, "query d_model"], y: Float[Tensor, "query d_model"]
) -> Float[Tensor, ""]:
    return ((operation.change(h) - y) / operation.gain).square().mean()


def _point(
    epoch: int,
    step: int,
    operation: ResidualMLP,
    h: Float[Tensor, "query d_model"],
    y: Float[Tensor, "query d_model"],
) -> dict[str, float]:
    with torch.no_grad():
        loss = float(_loss(operation, h, y))
    if not math.isfinite(loss):
        raise InvalidInput(
            f"Training diverged: the loss became {loss}; use a smaller step_size or depth."
        )
    return {"epoch": float(epoch), "step": float(step), "train_loss": loss}


def _detached(operation: ResidualMLP) -> ResidualMLP:
    detached = operation.map(Tensor.detach)
    assert isinstance(detached, ResidualMLP)
    return detached
