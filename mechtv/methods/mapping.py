"""The family of maps from zero-shot to in-context states: constant, linear, residual MLP.

How much of what demonstrations do to the last token's state is a shift, how much is linear, and
what is left for a nonlinear map (*Distributional Alignment as a Criterion for Designing Task
Vectors in In-Context Learning*, arXiv 2605.20730). All read the same states; `fit_linear` has more
options for the linear one.
"""

from dataclasses import asdict, dataclass
from typing import Literal, get_args

from transformer_lens.model_bridge import TransformerBridge

from mechtv.methods.cards import card_for
from mechtv.methods.frozen import frozen
from mechtv.methods.linear import LinearSettings, explained, linear_from_states
from mechtv.methods.ranges import (
    check_at_least,
    check_choices,
    check_not_negative,
    check_positive,
)
from mechtv.methods.residual_mlp import Curve, Plan, train_mlp
from mechtv.methods.states import Paired, last_token_site, paired_states
from mechtv.tasks.task import Task
from mechtv.vectors.edits import Add, Edit, ResidualMLP
from mechtv.vectors.site import Component, Site
from mechtv.vectors.vector import TaskVector

Mapping = Literal["constant", "linear", "mlp"]
MAPPINGS: tuple[Mapping, ...] = get_args(Mapping)
DEPTHS = (2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class MappingSettings:
    """Every option of `fit_mapping`; see there.

    Raises:
        InvalidInput: for a value outside its range.
    """

    mapping: Mapping
    layer: int
    component: Component
    shots: int
    n: int
    ridge: float
    depth: int
    epochs: int
    step_size: float
    weight_decay: float
    batch_size: int

    def __post_init__(self) -> None:
        check_choices(self, mapping=Mapping)
        check_at_least(self, 1, "depth", "epochs", "batch_size")
        check_positive(self, "step_size", "the paper's is 0.001")
        check_not_negative(self, "weight_decay", "the paper's is 0.01")

    @property
    def name(self) -> str:
        """The mapping, and an MLP's number of layers."""
        return f"mlp-{self.depth}" if self.mapping == "mlp" else self.mapping

    @property
    def site(self) -> Site:
        """Where the map is fitted and applied."""
        return Site(component=self.component, layer=self.layer)

    def mlp(self) -> Plan:
        """How the MLP is trained."""
        return Plan(
            depth=self.depth,
            epochs=self.epochs,
            step_size=self.step_size,
            weight_decay=self.weight_decay,
            batch_size=self.batch_size,
        )

    def linear(self) -> LinearSettings:
        """The settings of `fit_linear` for the linear map."""
        return LinearSettings(
            layer=self.layer,
            component=self.component,
            shots=self.shots,
            n=self.n,
            ridge=self.ridge,
            solver="auto",
            intercept=False,
            fit="same site",
        )


def fit_mapping(
    model: TransformerBridge,
    task: Task,
    layer: int | None = None,
    *,
    mapping: Mapping,
    depth: int = 2,
    shots: int = 30,
    n: int = 256,
    ridge: float = 5.0,
    component: Component = "resid_post",
    epochs: int = 20,
    step_size: float = 1e-3,
    weight_decay: float = 0.01,
    batch_size: int = 8,
    seed: int = 0,
    progress: bool | None = None,
) -> TaskVector:
    """Fit a map from zero-shot to in-context states at the last token of one layer.

    Args:
        layer: where states are read and the map is applied; the last block if None.
        mapping: `constant` adds the mean change, `linear` is `fit_linear`, `mlp` adds a residual
            MLP of the state (see `ResidualMLP`), trained by AdamW on the squared error.
        depth: the layers of the MLP, each as wide as the state; 1 is an affine map.
        shots, n: as for `fit_linear`: one fixed set of demonstrations, unlabelled queries.
        ridge: for `linear`.
        component: the site's component.
        epochs, step_size, weight_decay, batch_size: for `mlp`. It begins as the constant map and is
            trained in float32, on states less their mean in units of their root mean square
            component; the error is in units of the variance of the changes.
        seed: fixes the demonstrations and queries, and the MLP's start and batches.

    Returns:
        A vector with one edit, whose method is the mapping's name. For `mlp`, `.training_curve()`
        has the mean squared error over all queries, in those units, before training and after each
        epoch.

    Raises:
        InvalidInput: for values outside their ranges, a layer that the model lacks, fewer than 2
            queries besides the demonstrations, or a training that diverges.
    """
    settings = MappingSettings(
        mapping=mapping,
        layer=last_token_site(model, layer, component).layer,
        component=component,
        shots=shots,
        n=n,
        ridge=ridge,
        depth=depth,
        epochs=epochs,
        step_size=step_size,
        weight_decay=weight_decay,
        batch_size=batch_size,
    )
    states = paired_states(
        model, task, settings.site, shots=shots, n=n, seed=seed, progress=progress
    )
    return mapping_from_states(model, task, settings, states, seed=seed, progress=progress)


def mapping_from_states(
    model: TransformerBridge,
    task: Task,
    settings: MappingSettings,
    states: Paired,
    *,
    seed: int,
    progress: bool | None = None,
) -> TaskVector:
    """`fit_mapping` for states that have been read."""
    if settings.mapping == "linear":
        return linear_from_states(model, task, settings.linear(), states, seed=seed)
    h, y = states[0], states[1] - states[0]
    operation: Add | ResidualMLP
    curve: Curve = []
    if settings.mapping == "constant":
        operation = Add(value=y.mean(dim=0))
        predicted = operation.value.expand_as(y)
    else:
        with frozen(model):
            operation, curve = train_mlp(h, y, settings.mlp(), seed=seed, progress=progress)
        predicted = operation.change(h)
    fitted = explained(y.cpu().double(), predicted.cpu().double())
    card = card_for(
        model,
        task,
        method=settings.mapping,
        settings=asdict(settings) | {"n": len(h), **fitted},
        seed=seed,
        curve=curve,
    )
    return TaskVector(edits=(Edit(site=settings.site, operation=operation),), card=card)
