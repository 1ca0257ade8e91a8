"""The mean effect of a vector as one matrix: the Jacobian, averaged over queries and over the path.

A network is not linear, but by the fundamental theorem of calculus its response to theta is
exactly a matrix times theta: W = E_x of the integral over alpha from 0 to 1 of
d h_final(x; alpha theta) / d theta. No fit is needed, and nothing has to be small (METHODS,
section 4). W depends on theta: it is the right matrix for this vector's rotation and stretch, not
a model of other vectors.

TransformerLens's `tools.analysis.JacobianLens` averages Jacobians too, of another thing: at the
plain run (alpha = 0), over a corpus, over many source positions, each with its effects on all later
positions summed, and from the output of block l. Here the source and the target are the last prompt
token alone, from the input of block l, along the whole path to theta. Where a prompt has one valid
position, its matrix for block l - 1 is `mean_jacobian` at zero.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.analysis.perturbations import residuals_under, working
from mechtv.analysis.subject import Subject
from mechtv.errors import InvalidInput
from mechtv.evaluation.provenance import UNKNOWN, Provenance
from mechtv.evaluation.seeds import seed_for
from mechtv.forward.probe import last_residual
from mechtv.forward.run import kept
from mechtv.methods.frozen import frozen
from mechtv.progress import progress_bar
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import SplitName, Task
from mechtv.vectors.vector import TaskVector

ROWS = 128  # that run at once; more are no faster on a CPU
COTANGENTS = 512  # rows times output coordinates that go backward at once


@dataclass(frozen=True, kw_only=True, eq=False)
class IntegratedJacobian:
    """W, with the effect that it should give.

    Args:
        theta: the vector, added at the input of block `layer` at the last token.
        matrix: W; it maps a change there to a change of the residual stream behind the last block.
        effect: the measured mean change over the same queries.
        nodes: how many points of the path were taken; `n` how many queries, of `split`.
        centred: whether norms and cosines should be of centred vectors (under LayerNorm).
    """

    task: str
    layer: int
    theta: Float[Tensor, " d_model"]
    matrix: Float[Tensor, "d_model_out d_model_in"]
    effect: Float[Tensor, " d_model"]
    nodes: int
    n: int
    split: str
    centred: bool
    name: str = "integrated"
    provenance: Provenance = UNKNOWN

    @property
    def error(self) -> float:
        """The norm of W theta - effect over that of the effect: what too few nodes leave over."""
        return float((self.matrix @ self.theta - self.effect).norm() / self.effect.norm())

    @property
    def relative_error(self) -> float:
        """That of the matrix as a share of its norm: the path's, or the number format's."""
        rounding = float(torch.finfo(self.theta.dtype).eps * len(self.theta) ** 0.5)
        return max(self.error, rounding)

    def table(self) -> pd.DataFrame:
        """One row: how many nodes and queries, and the relative error."""
        row = {
            "task": self.task,
            "layer": self.layer,
            "name": self.name,
            "split": self.split,
            "nodes": self.nodes,
            "score": "relative error",
            "value": self.error,
            "n": self.n,
        }
        return pd.DataFrame([row | self.provenance.columns()])


def integrate_jacobian(
    model: TransformerBridge,
    task: Task,
    vector: TaskVector,
    *,
    nodes: int = 8,
    n: int = 16,
    split: SplitName = "train",
    seed: int | None = None,
    progress: bool | None = None,
) -> IntegratedJacobian:
    """The integrated Jacobian of a vector (docs/analyses.md), by Gauss-Legendre quadrature.

    Each of `nodes` x `n` rows is run once and goes backward d_model times: on a CPU minutes for
    early layers, growing with both numbers. Look at `error` of the result: with too few nodes it
    is large. It falls fast where the model is smooth, slowly where it has kinks (ReLU, as in OPT).

    Args:
        nodes: points of the path from 0 to theta.
        n: how many zero-shot queries the Jacobian is averaged over.
        seed: whose splits are used; the vector's own if None.

    Raises:
        InvalidInput: unless the vector adds one value before a block at the last token; for fewer
            than one node, or more queries than the split has.
    """
    subject = Subject.of(model, vector)
    seed = seed_for(vector) if seed is None else seed
    prompts = Prompts.of(model, task, split=split, n=n, seed=seed)
    theta = working(model, subject.theta)
    alphas, weights = gauss_legendre(nodes)
    at = alphas.to(theta)[:, None] * theta
    matrix = mean_jacobian(model, prompts, subject.layer, at, weights, progress=progress)
    plain, under = residuals_under(
        model, prompts, subject, torch.stack([torch.zeros_like(theta), theta])
    )
    return IntegratedJacobian(
        task=task.name,
        layer=subject.layer,
        theta=theta,
        matrix=matrix,
        effect=(under - plain).mean(dim=0),
        nodes=nodes,
        n=len(prompts),
        split=split,
        centred=subject.is_centred(model),
        provenance=Provenance.of(model, task, seed),
    )


def gauss_legendre(nodes: int) -> tuple[Float[Tensor, " node"], Float[Tensor, " node"]]:
    """Points between 0 and 1, and weights that sum to 1; exact for degrees below 2 * nodes.

    Raises:
        InvalidInput: for fewer than one node.
    """
    if nodes < 1:
        raise InvalidInput(f"nodes={nodes} is too few to integrate with; use 1 or more.")
    points, weights = np.polynomial.legendre.leggauss(nodes)
    return torch.from_numpy((points + 1) / 2), torch.from_numpy(weights / 2)


def mean_jacobian(
    model: TransformerBridge,
    prompts: Prompts,
    layer: int,
    at: Float[Tensor, "point d_model"],
    weights: Float[Tensor, " point"],
    *,
    progress: bool | None = None,
) -> Float[Tensor, "d_model_out d_model_in"]:
    """Jacobians at some shifts of the input of block `layer`, summed by weight, mean over prompts.

    Source and target are the last tokens. Reverse mode: all rows share one leaf, so one backward
    pass gives an output coordinate's row of the whole mean.
    """
    width = at.shape[1]
    total = at.new_zeros(width, width)
    share = weights.to(at) / len(prompts)
    chunks = list(_chunks(prompts, len(at)))
    with (
        frozen(model),
        _kept(model, prompts, layer, at[0]),
        progress_bar(title="Jacobian", total=len(chunks) * width, show=progress) as bar,
    ):
        for query, point in chunks:
            leaf = at.new_zeros(width, requires_grad=True)
            shifts = at[point.to(at.device)] + leaf
            states = _shifted(model, prompts.select(query.tolist()), layer, shifts)
            weight = share[point.to(at.device)].to(states)
            for some in torch.arange(width).split(max(1, COTANGENTS // len(query))):
                total[some.to(total.device)] += _rows(states, leaf, weight, some)
                bar.update(len(some))
    return total


def directional_derivatives(
    model: TransformerBridge,
    prompts: Prompts,
    layer: int,
    at: Float[Tensor, "point d_model"],
    along: Float[Tensor, "point d_model"],
    *,
    progress: bool | None = None,
) -> Float[Tensor, "point batch d_model"]:
    """J_x(at) along: how the last residual stream changes with a step there, for each prompt.

    Exact, by two backward passes: the first is linear in its cotangent, and its derivative by that
    cotangent is the Jacobian itself. Forward mode is no faster, and some models' activation
    functions do not know it.
    """
    found = at.new_empty(len(at), len(prompts), at.shape[1])
    chunks = list(_chunks(prompts, len(at)))
    with (
        frozen(model),
        _kept(model, prompts, layer, at[0]),
        progress_bar(title="derivatives", total=len(chunks), show=progress) as bar,
    ):
        for query, point in chunks:
            there = point.to(at.device)
            shifts = at[there].requires_grad_()
            states = _shifted(model, prompts.select(query.tolist()), layer, shifts)
            cotangent = torch.zeros_like(states, requires_grad=True)
            (back,) = torch.autograd.grad(states, shifts, cotangent, create_graph=True)
            (step,) = torch.autograd.grad(back, cotangent, along[there].to(back))
            found[there, query.to(at.device)] = step.to(found)
            bar.update()
    return found


def _chunks(
    prompts: Prompts, n_points: int
) -> Iterator[tuple[Int[Tensor, " row"], Int[Tensor, " row"]]]:
    """All pairs of a query and a point, some at a time, queries of like length together."""
    query = prompts.lengths.argsort(stable=True).repeat_interleave(n_points)
    point = torch.arange(n_points).repeat(len(prompts))
    yield from zip(query.split(ROWS), point.split(ROWS), strict=True)


def _kept(
    model: TransformerBridge, prompts: Prompts, layer: int, value: Float[Tensor, " d_model"]
) -> AbstractContextManager[None]:
    return kept(model, prompts, Subject(layer=layer, theta=value).vector())


def _shifted(
    model: TransformerBridge,
    prompts: Prompts,
    layer: int,
    shifts: Float[Tensor, "batch d_model"],
) -> Float[Tensor, "batch d_model"]:
    point = f"blocks.{layer}.hook_resid_pre"
    return last_residual(model, prompts, changes={point: lambda x: x + shifts.to(x)})


def _rows(
    states: Float[Tensor, "batch d_model"],
    leaf: Float[Tensor, " d_model"],
    weight: Float[Tensor, " batch"],
    which: Int[Tensor, " some"],
) -> Float[Tensor, "some d_model"]:
    """Some output coordinates' rows of the weighted sum of all rows' Jacobians."""
    cotangents = states.new_zeros(len(which), *states.shape)
    cotangents[torch.arange(len(which)), :, which] = weight
    (found,) = torch.autograd.grad(
        states, leaf, cotangents, retain_graph=True, is_grads_batched=True
    )
    return found.detach()
