"""Maps from zero-shot to in-context states, compared on held-out queries.

By the error of the mapped state, by dNTP, and by accuracy (*Distributional Alignment as a Criterion
for Designing Task Vectors in In-Context Learning*, arXiv 2605.20730).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.evaluation.intervals import Estimate, mean
from mechtv.evaluation.scoring import Scorer, Scores
from mechtv.methods.mapping import (
    DEPTHS,
    MAPPINGS,
    Mapping,
    MappingSettings,
    mapping_from_states,
)
from mechtv.methods.states import Paired, last_token_site, paired_states
from mechtv.tasks.task import Task
from mechtv.vectors.site import Component
from mechtv.vectors.vector import TaskVector


@dataclass(frozen=True, kw_only=True, eq=False)
class MappingScore:
    """How one map does on held-out queries.

    Args:
        mapping: `constant`, `linear`, `mlp-4` (layers), or `zero-shot` for none.
        state_errors: for each query the mean squared component of the difference between the mapped
            and the in-context state.
        scores: of the zero-shot run under the map.
    """

    mapping: str
    state_errors: Float[np.ndarray, " query"]
    scores: Scores

    @property
    def state_mse(self) -> Estimate:
        """The mean over queries of the squared error of the state."""
        return mean(self.state_errors)

    def table(self) -> pd.DataFrame:
        """One row a score: value, 95 % interval, n."""
        columns = ["score", "value", "low", "high", "n"]
        state = pd.DataFrame([{"score": "state MSE"} | asdict(self.state_mse)])
        rows = pd.concat([state, self.scores.table()[columns]], ignore_index=True)
        evaluation = self.scores.evaluation
        about = {"task": evaluation.task, "mapping": self.mapping}
        return rows.assign(**about, **evaluation.provenance.columns())[
            [*about, *columns, *evaluation.provenance.columns()]
        ]


def compare_mappings(
    model: TransformerBridge,
    task: Task,
    layer: int | None = None,
    *,
    mappings: Sequence[Mapping] = MAPPINGS,
    depths: Sequence[int] = DEPTHS,
    shots: int = 30,
    n: int = 256,
    n_test: int | None = None,
    ridge: float = 5.0,
    component: Component = "resid_post",
    epochs: int = 20,
    step_size: float = 1e-3,
    weight_decay: float = 0.01,
    batch_size: int = 8,
    seed: int = 0,
    progress: bool | None = None,
) -> pd.DataFrame:
    """Fit the mappings to the same states, and score them on test queries beside no map at all.

    The state's error is to the in-context run with the demonstrations that the maps were fitted
    with; dNTP and accuracies are those of `dntp` and `evaluate`, whose demonstrations are drawn for
    each query.

    Args:
        mappings: which; an `mlp` once for each of `depths`.
        n_test: how many test queries; all if None. All else as in `fit_mapping`.

    Returns:
        One row a (mapping, score): `state MSE`, accuracies, log-probability, dNTP; value, 95 %
        interval, number of queries.

    Raises:
        InvalidInput: as `fit_mapping` and `dntp`, and for no mappings.
    """
    base = MappingSettings(
        mapping="constant",
        layer=last_token_site(model, layer, component).layer,
        component=component,
        shots=shots,
        n=n,
        ridge=ridge,
        depth=1,
        epochs=epochs,
        step_size=step_size,
        weight_decay=weight_decay,
        batch_size=batch_size,
    )
    wanted = [
        replace(base, mapping=mapping, depth=depth)
        for mapping in mappings
        for depth in (depths if mapping == "mlp" else (1,))
    ]
    if not wanted:
        raise InvalidInput(f"There are no mappings to compare; give some of {', '.join(MAPPINGS)}.")
    scorer = Scorer(model, task, shots=shots, n=n_test, seed=seed, progress=progress)
    read = partial(paired_states, model, task, base.site, shots=shots, seed=seed, progress=progress)
    held_out = read(n=len(scorer.zero_shot), split="test")
    states = read(n=n)
    found = []
    for one in (None, *wanted):
        vector = (
            None
            if one is None
            else mapping_from_states(model, task, one, states, seed=seed, progress=progress)
        )
        name = "zero-shot" if one is None else one.name
        found.append(
            MappingScore(
                mapping=name,
                state_errors=_state_errors(held_out, vector),
                scores=scorer.score(name, vector),
            )
        )
    return pd.concat([score.table() for score in found], ignore_index=True)


def _state_errors(states: Paired, vector: TaskVector | None) -> Float[np.ndarray, " query"]:
    """Each query's mean squared component of what is left between the two states."""
    h, target = states
    if vector is not None:
        slot = torch.zeros(len(h), dtype=torch.long, device=h.device)
        h = vector.edits[0].operation(h, slot)
    errors = (h - target).cpu().double().square().mean(dim=-1)
    return errors.numpy()
