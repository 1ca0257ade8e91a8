"""Which published claims about methods hold in methods.csv: counts and differences over tasks.

    python figures/methods_claims.py          (after figures/methods_table.py)

Writes figures/results/methods_claims.csv: for each claim and layer (none: each method at the layer
that is best on validation) for how many tasks it holds, and the mean difference over tasks with its
95 % bootstrap interval (tasks are resampled).
"""

from pathlib import Path

import pandas as pd
import typer

from mechtv.evaluation.intervals import mean
from mechtv.files import write_whole

EXTRACTED = ("hidden_state", "function_vector", "state_vector", "linear")
ACCURACIES = ("accuracy, full vocabulary", "accuracy, label-restricted")
DNTP = "dNTP over vocabulary"


def main(results: Path = Path(__file__).parent / "results") -> None:
    rows = pd.read_csv(results / "methods.csv")
    test = rows[rows["split"] == "test"]
    found = []
    layers = sorted(test["layer"].dropna().unique())
    for score in ACCURACIES:
        for layer in layers:
            here = _wide(test, score, layer)
            best = here[list(EXTRACTED)].max(axis=1)
            claim = f"learned above every extracted vector: {score}"
            found.append(_row(claim, layer, here["learned"] - best))
    best = _wide_best(results / "methods_best.csv", test)
    for score in ACCURACIES:
        gain = best[score]["learned"] - best[score]["in-context"]
        found.append(_row(f"learned reaches in-context: {score}", None, gain))
    others = [name for name in EXTRACTED if name != "linear"]
    claim = "linear has the lowest dNTP of the extracted vectors"
    for layer, distance in [*((x, _wide(test, DNTP, x)) for x in layers), (None, best[DNTP])]:
        found.append(_row(claim, layer, distance[others].min(axis=1) - distance["linear"]))
    distance = best[DNTP]
    claim = "learned-dntp has the lowest dNTP of all"
    rest = distance[[*EXTRACTED, "i2cl", "learned"]].min(axis=1)
    found.append(_row(claim, None, rest - distance["learned-dntp"]))
    table = pd.DataFrame(found)
    write_whole(results / "methods_claims.csv", table.to_csv(index=False).encode())


def _wide(test: pd.DataFrame, score: str, layer: float) -> pd.DataFrame:
    here = test[(test["score"] == score) & (test["layer"] == layer)]
    return here.pivot(index="task", columns="method", values="value")


def _wide_best(file: Path, test: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Each score at the layer that is best on validation: one row a task, one column a method."""
    chosen = pd.read_csv(file)[["task", "method", "layer"]]
    chosen["layer"] = pd.to_numeric(chosen["layer"], errors="coerce")
    rows = test.merge(chosen, on=["task", "method"], suffixes=("", "_best"))
    is_best = (rows["layer"] == rows["layer_best"]) | rows["layer_best"].isna()
    return {
        str(score): own.pivot(index="task", columns="method", values="value")
        for score, own in rows[is_best].groupby("score")
    }


def _row(claim: str, layer: float | None, difference: pd.Series) -> dict[str, object]:
    difference = difference.dropna()
    e = mean(difference.to_numpy())
    return {
        "claim": claim,
        "layer": layer,
        "holds_for": int((difference > 0).sum()),
        "tasks": e.n,
        "mean_difference": e.value,
        "low": e.low,
        "high": e.high,
        "fails_for": ", ".join(difference.index[difference <= 0]),
    }


if __name__ == "__main__":
    typer.run(main)
