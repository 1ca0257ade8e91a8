"""What came of putting vectors in theta's place: scores, and the share of theta's gain.

See `mechtv.analysis.reconstruction`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float

from mechtv.analysis.answers import Answers
from mechtv.analysis.ov import Settings
from mechtv.errors import InvalidInput
from mechtv.evaluation.intervals import Estimate, mean, mean_share, ratio
from mechtv.evaluation.provenance import UNKNOWN, Provenance

ZERO, FULL, OV, MLP, BOTH = "zero-shot", "theta", "OV", "MLP", "OV + MLP"
RECOVERED = "share of the gain recovered"


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What something in theta's place does to each query.

    Args:
        cosine, norm: of the sum of what is added: its cosine with theta, its norm over theta's,
            both as the model sees them (centred under LayerNorm).
    """

    answers: Answers
    cosine: Float[np.ndarray, " query"]
    norm: Float[np.ndarray, " query"]

    def scores(self) -> dict[str, np.ndarray]:
        """Each score by name, query by query."""
        found = self.answers.scores()
        if not np.isnan(self.cosine).any():
            found |= {"cosine with theta": self.cosine, "norm, of theta's": self.norm}
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Reconstruction:
    """One vector, what was put in its place, and what came of it.

    Args:
        outcomes: whose logit differences are all against the rivals of the zero-shot run: of
            `zero-shot` (nothing in theta's place), `theta`, `OV`, and, where the model has
            MLPs, `MLP` and `OV + MLP`.
        nulls: for `OV` and `MLP` and each kind of null (a random vector of the same `norm`, or of
            the same `norm and cosine` with theta), the outcome of each draw.
        shares: the norm of each reconstruction's sum in theta's, where that was set.
    """

    task: str
    layer: int
    split: str
    settings: Settings
    outcomes: Mapping[str, Outcome]
    nulls: Mapping[tuple[str, str], tuple[Outcome, ...]]
    shares: Mapping[str, float]
    provenance: Provenance = UNKNOWN

    def recovered(self, part: str, null: str = "") -> Estimate:
        """The share of theta's gain in log-probability: (part - zero-shot) / (theta - zero-shot).

        With the paired bootstrap interval over queries (2,000 resamples, fixed seed); of a null,
        the mean of its draws. It is unknown (NaN) where theta gains nothing, and so is its interval
        where that of theta's gain reaches down to 0.
        """
        draws = self._draws(part, null)
        return self._share(np.stack([draw.answers.log_probability for draw in draws]))

    def table(self) -> pd.DataFrame:
        """One row a part, null and score: value, 95 % interval over queries, n.

        Of nulls the value is the mean over their `draws`; `lowest` and `highest` are the extreme
        draws' own values.
        """
        about = {"task": self.task, "layer": self.layer, "split": self.split}
        s = self.settings
        how = {"reading": s.reading, "norm": s.norm, "attention": s.attention, "rescale": s.rescale}
        keys = [(part, "") for part in self.outcomes] + list(self.nulls)
        return pd.DataFrame(
            about
            | {"part": part, "null": null}
            | row
            | how
            | {"mlp_state": s.mlp_state, "share": self.shares.get(part)}
            | self.provenance.columns()
            for part, null in keys
            for row in self._rows(part, null)
        )

    def _draws(self, part: str, null: str) -> tuple[Outcome, ...]:
        found = self.nulls.get((part, null)) if null else (self.outcomes.get(part),)
        if not found or found[0] is None:
            known = [*self.outcomes, *(f"{p} with null {kind!r}" for p, kind in self.nulls)]
            raise InvalidInput(
                f"There is no {part!r}{f' with null {null!r}' if null else ''} in this "
                f"reconstruction; it has {', '.join(known)}."
            )
        return tuple(one for one in found if one is not None)

    def _rows(self, part: str, null: str) -> list[dict[str, object]]:
        draws = self._draws(part, null)
        each = [draw.scores() for draw in draws]
        rows = []
        for score in each[0]:
            values = np.stack([scores[score] for scores in each])
            is_share = values.dtype == np.bool_
            found = mean_share(values.T) if is_share else mean(values.mean(axis=0))
            rows.append(_row(score, found, values.mean(axis=1)))
        log_p = np.stack([draw.answers.log_probability for draw in draws])
        whole = float(self._gain.mean())
        alone = (log_p - self._base).mean(axis=1) / (whole if whole > 0 else np.nan)
        return [*rows, _row(RECOVERED, self._share(log_p), alone)]

    @property
    def _base(self) -> Float[np.ndarray, " query"]:
        return self.outcomes[ZERO].answers.log_probability

    @property
    def _gain(self) -> Float[np.ndarray, " query"]:
        gain: Float[np.ndarray, " query"] = self.outcomes[FULL].answers.log_probability - self._base
        return gain

    def _share(self, log_p: Float[np.ndarray, "draw query"]) -> Estimate:
        found = ratio(log_p.mean(axis=0) - self._base, self._gain)
        if self._gain.mean() > 0:
            return found
        return Estimate(value=np.nan, low=np.nan, high=np.nan, n=found.n)


@dataclass(frozen=True, kw_only=True, eq=False)
class ReconstructionByLayer:
    """The reconstructions of vectors of several layers, in rising order (protocol L4)."""

    layers: tuple[Reconstruction, ...]

    def table(self) -> pd.DataFrame:
        """The tables of all layers in one."""
        return pd.concat([one.table() for one in self.layers], ignore_index=True)


def _row(score: str, found: Estimate, draws: Float[np.ndarray, " draw"]) -> dict[str, object]:
    numbers = {"value": found.value, "low": found.low, "high": found.high, "n": found.n}
    spread = {"draws": len(draws), "lowest": draws.min(), "highest": draws.max()}
    return {"score": score} | numbers | spread
