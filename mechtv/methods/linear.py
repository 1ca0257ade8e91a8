"""Linear task vectors: one matrix, in closed form, from zero-shot to in-context states.

*Distributional Alignment as a Criterion for Designing Task Vectors in In-Context Learning* (arXiv
2605.20730): with H the zero-shot and Y the change to the in-context states, one column a query,
W = Y Hᵀ (H Hᵀ + λ I)⁻¹, and h <- h + W h. It needs no answers and no training; `learn` does better
where there are answers.
"""

from dataclasses import asdict, dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.methods.cards import card_for
from mechtv.methods.ranges import check_choices, check_not_negative
from mechtv.methods.states import Paired, last_token_site, paired_states
from mechtv.tasks.task import Task
from mechtv.vectors.edits import Edit, Linear
from mechtv.vectors.site import Component, Site
from mechtv.vectors.vector import TaskVector

Solver = Literal["auto", "primal", "dual"]
SolvedBy = Literal["primal", "dual", "least norm"]
Fit = Literal["same site", "after norm"]


@dataclass(frozen=True, kw_only=True)
class LinearSettings:
    """Every option of `fit_linear`; see there.

    Raises:
        InvalidInput: for a value outside its range.
    """

    layer: int
    component: Component
    shots: int
    n: int
    ridge: float
    solver: Solver
    intercept: bool
    fit: Fit

    def __post_init__(self) -> None:
        check_choices(self, solver=Solver, fit=Fit)
        check_not_negative(self, "ridge", "the paper's is 5")

    @property
    def site(self) -> Site:
        """Where the map is applied."""
        return Site(component=self.component, layer=self.layer)


def fit_linear(
    model: TransformerBridge,
    task: Task,
    layer: int | None = None,
    *,
    shots: int = 30,
    n: int = 256,
    ridge: float = 5.0,
    solver: Solver = "auto",
    intercept: bool = False,
    fit: Fit = "same site",
    component: Component = "resid_post",
    seed: int = 0,
    progress: bool | None = None,
) -> TaskVector:
    """Fit h <- h + W h at the last token, by ridge regression on unlabelled queries.

    Args:
        layer: where states are read and the map is applied; the last block if None.
        shots: demonstrations in all (balanced over the labels), one fixed set before every query.
        n: how many queries: training examples that are no demonstrations; fewer if there are fewer.
        ridge: λ, in squared units of the states, by default the paper's. Where states have norms in
            the hundreds that is next to no penalty; there, larger ones (1e3 to 1e6) generalise
            better. 0 gives the least-squares map of least norm.
        solver: the `primal` d_model x d_model system, the `dual` n x n one, or `auto`: the smaller.
            Both give one W; with ridge 0 neither is needed.
        intercept: fit h <- h + W h + b with an unpenalised b. This is the fit to centred states and
            changes, h + W (h - mean h) + mean y, so b = mean y - W mean h.
        fit: `same site` fits where the map is applied. `after norm` is what the authors' code does:
            W is fitted to states behind the final norm (Hugging Face's `hidden_states[-1]`), but
            applied before it, to a stream of another size. For the last layer's output only.
        component: the site's component.

    Returns:
        A vector with one `Linear` edit. Its card has the number of queries used, the solver used,
        and the fit's in-sample R²: `r2` counts from the mean change (the constant map has 0),
        `r2_about_zero` from no change (the zero-shot run has 0).

    Raises:
        InvalidInput: for values outside their ranges, a layer that the model lacks, fewer than 2
            queries besides the demonstrations, or prompts that exceed the context.
    """
    settings = LinearSettings(
        layer=last_token_site(model, layer, component).layer,
        component=component,
        shots=shots,
        n=n,
        ridge=ridge,
        solver=solver,
        intercept=intercept,
        fit=fit,
    )
    states = paired_states(
        model,
        task,
        settings.site,
        shots=shots,
        n=n,
        seed=seed,
        after_norm=fit == "after norm",
        progress=progress,
    )
    return linear_from_states(model, task, settings, states, seed=seed)


def linear_from_states(
    model: TransformerBridge, task: Task, settings: LinearSettings, states: Paired, *, seed: int
) -> TaskVector:
    """`fit_linear` for states that have been read."""
    zero_shot, in_context = states
    h = zero_shot.cpu().double()
    y = in_context.cpu().double() - h
    found = ridge_map(
        h, y, ridge=settings.ridge, solver=settings.solver, intercept=settings.intercept
    )
    bias = None if found.bias is None else found.bias.to(zero_shot)
    operation = Linear(matrix=found.matrix.to(zero_shot), bias=bias)
    measured = {"n": len(h), "solved_by": found.solved_by, **explained(y, found.predict(h))}
    card = card_for(model, task, method="linear", settings=asdict(settings) | measured, seed=seed)
    return TaskVector(edits=(Edit(site=settings.site, operation=operation),), card=card)


@dataclass(frozen=True, kw_only=True, eq=False)
class RidgeMap:
    """y ≈ W h + b (no b without an intercept), in float64 on the CPU."""

    matrix: Float[Tensor, "d_out d_in"]
    bias: Float[Tensor, " d_out"] | None
    solved_by: SolvedBy

    def predict(self, h: Float[Tensor, "query d_in"]) -> Float[Tensor, "query d_out"]:
        """W h + b of each row."""
        product = h @ self.matrix.T
        return product if self.bias is None else product + self.bias


def ridge_map(
    h: Float[Tensor, "query d_in"],
    y: Float[Tensor, "query d_out"],
    *,
    ridge: float,
    solver: Solver = "auto",
    intercept: bool = False,
) -> RidgeMap:
    """The W (and b) of least Σ ‖y - W h - b‖² + ridge ‖W‖².

    With ridge 0, of all maps of least error the one of least norm, by singular values.

    Raises:
        InvalidInput: if `ridge` is too small for a system that has no inverse without it.
    """
    h, y = h.cpu().double(), y.cpu().double()
    mean_h, mean_y = h.mean(dim=0), y.mean(dim=0)
    if intercept:
        h, y = h - mean_h, y - mean_y
    solved_by: SolvedBy
    if not ridge:
        solved_by = "least norm"
        matrix = torch.linalg.lstsq(h, y, driver="gelsd").solution.T
    elif solver == "dual" or (solver == "auto" and h.shape[0] < h.shape[1]):
        solved_by = "dual"
        matrix = _solve(h @ h.T, y, ridge).T @ h
    else:
        solved_by = "primal"
        matrix = _solve(h.T @ h, h.T @ y, ridge).T
    bias = mean_y - matrix @ mean_h if intercept else None
    return RidgeMap(matrix=matrix, bias=bias, solved_by=solved_by)


def explained(
    y: Float[Tensor, "query d_model"], predicted: Float[Tensor, "query d_model"]
) -> dict[str, float | None]:
    """R² counted from the mean change, and from no change; None where all changes are that."""
    left = float((y - predicted).square().sum())
    about_mean = float((y - y.mean(dim=0)).square().sum())
    about_zero = float(y.square().sum())
    return {
        "r2": 1 - left / about_mean if about_mean else None,
        "r2_about_zero": 1 - left / about_zero if about_zero else None,
    }


def _solve(
    gram: Float[Tensor, "side side"], right: Float[Tensor, "side d_out"], ridge: float
) -> Float[Tensor, "side d_out"]:
    shifted = gram + ridge * torch.eye(len(gram), dtype=gram.dtype)
    factor, failed = torch.linalg.cholesky_ex(shifted)
    if int(failed):
        raise InvalidInput(
            f"ridge={ridge} is lost in the rounding of these states, whose squares reach "
            f"{float(gram.diagonal().max()):.1e}; use a larger one, or 0 for the map of least norm."
        )
    return torch.cholesky_solve(right, factor)
