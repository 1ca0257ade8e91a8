"""What the papers claim about why vectors work, as numbers with intervals and nulls.

    python figures/why_claims.py          (after figures/why_it_works.py)

Writes figures/results/why_claims.csv: one row a (model, task, layer of the vector, quantity).
"""

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import typer

from mechtv.files import write_whole

CELL = ["model", "task", "vector_layer"]
ACCURACIES = ("accuracy, full vocabulary", "accuracy, label-restricted")
LOG_P = "log-probability"
COLUMNS = ["quantity", "value", "low", "high", "n", "null", "null_low", "null_high"]


def main(results: Path = Path(__file__).parent / "results") -> None:
    parts = [part for make in MAKERS for part in make(results)]
    table = pd.concat(parts, ignore_index=True).sort_values(CELL, kind="stable")
    known = [column for column in COLUMNS if column in table.columns]
    write_whole(results / "why_claims.csv", table[[*CELL, *known]].to_csv(index=False).encode())


def _read(results: Path, part: str) -> pd.DataFrame:
    return pd.read_csv(results / f"why_{part}.csv", keep_default_na=True)


def accuracy(results: Path) -> Iterator[pd.DataFrame]:
    rows = _read(results, "evaluation")
    for score in ACCURACIES:
        own = rows[rows["score"] == score]
        yield own.assign(quantity=own["setting"] + ": " + score)


def reconstruction(results: Path) -> Iterator[pd.DataFrame]:
    """Shares of theta's gain in log-probability, and accuracies, of OV and MLPs in its place."""
    rows = _read(results, "reconstruction")
    is_null = rows["null"].notna()
    for score in ("share of the gain recovered", *ACCURACIES):
        own = rows[(rows["score"] == score) & ~is_null & ~rows["part"].isin(["zero-shot", "theta"])]
        null = rows[(rows["score"] == score) & (rows["null"] == "norm and cosine")]
        null = null[[*CELL, "part", "value", "lowest", "highest"]].rename(
            columns={"value": "null", "lowest": "null_low", "highest": "null_high"}
        )
        found = own.drop(columns=["null"]).merge(null, on=[*CELL, "part"], how="left")
        yield found.assign(quantity=found["part"] + " in theta's place: " + score)


def readers(results: Path) -> Iterator[pd.DataFrame]:
    rows = _read(results, "readers")
    own = rows[rows["effect"] == "Shapley value"]
    yield own.assign(
        quantity="Shapley share of " + own["reader"],
        value=own["share"],
        low=own["share_low"],
        high=own["share_high"],
    )


def key_heads(results: Path) -> Iterator[pd.DataFrame]:
    """What is left without the top tenth of heads, beside 20 random sets of as many."""
    rows = _read(results, "ablation")
    for score in (ACCURACIES[0], LOG_P):
        own = rows[rows["score"] == score]
        given = own[own["condition"] == "given heads"]
        null = own[own["condition"] == "random heads"]
        null = null[[*CELL, "value", "low", "high"]].rename(
            columns={"value": "null", "low": "null_low", "high": "null_high"}
        )
        found = given.merge(null, on=CELL)
        yield found.assign(quantity=f"without key heads: {score}")
        yield own[own["condition"] == "intact"].assign(quantity=f"with all heads: {score}")
        p_values = found.drop(columns=["low", "high", "null", "null_low", "null_high"])
        yield p_values.assign(quantity=f"p-value of key heads: {score}", value=found["p_value"])
    heads = _read(results, "heads")
    yield heads.assign(quantity="Spearman of saliency and exhaustive ablation")


def layers_of_key_heads(results: Path) -> Iterator[pd.DataFrame]:
    """Where key heads lie: the share of them in the first half of the blocks behind the vector."""
    rows = _read(results, "histogram")
    for key, own in rows.groupby(CELL):
        depth = own["layer"].rank(method="dense")
        early = own[depth <= depth.max() / 2]
        share = early["key_heads"].sum() / own["key_heads"].sum()
        row = dict(zip(CELL, key, strict=True)) | {"value": share, "n": own["key_heads"].sum()}
        null = early["n_heads"].sum() / own["n_heads"].sum()
        yield pd.DataFrame([row | {"quantity": "key heads in the earlier half", "null": null}])


def attention(results: Path) -> Iterator[pd.DataFrame]:
    rows = _read(results, "attention")
    own = rows[(rows["group"] == "key")]
    null = rows[rows["group"] == "random"][[*CELL, "part", "value", "low", "high"]].rename(
        columns={"value": "null", "low": "null_low", "high": "null_high"}
    )
    found = own.merge(null, on=[*CELL, "part"])
    yield found.assign(quantity="attention of key heads to " + found["part"])


def propagation(results: Path) -> Iterator[pd.DataFrame]:
    rows = _read(results, "propagation")
    held = (rows["setting"] == "held-out perturbations") & (rows["queries"] == "test")
    own = rows[held & rows["score"].isin(["R²", "cosine"])]
    yield own.assign(quantity="held-out " + own["score"] + " of the fitted map")
    for setting in ("W theta at the end", "mean effect at the end"):
        own = rows[(rows["setting"] == setting) & (rows["score"] == ACCURACIES[0])]
        yield own.assign(quantity=f"{setting}: {ACCURACIES[0]}")
    jacobian = _read(results, "jacobian")
    yield jacobian.assign(quantity="relative error of the integrated Jacobian, 8 nodes")


def rotation(results: Path) -> Iterator[pd.DataFrame]:
    rows = _read(results, "rotation").rename(columns={"null_mean": "null"})
    yield rows.assign(quantity=rows["measure"] + " of the " + rows["map"] + " map")
    rows = _read(results, "alignment").rename(
        columns={"random": "null", "random_low": "null_low", "random_high": "null_high"}
    )
    quantity = "alignment of " + rows["vector"] + " with the task's tokens"
    yield rows.assign(quantity=quantity, value=rows["alignment"])


MAKERS = (
    accuracy,
    reconstruction,
    readers,
    key_heads,
    layers_of_key_heads,
    attention,
    propagation,
    rotation,
)

if __name__ == "__main__":
    typer.run(main)
