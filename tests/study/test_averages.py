"""Several seeds as one: means of scores, with layers and methods chosen within each seed."""

import pandas as pd
import pytest

from mechtv.errors import InvalidInput
from mechtv.study import MethodComparison
from mechtv.study.averages import best_layers, best_vectors, over_seeds

FULL = "accuracy, full vocabulary"


def rows(*cells) -> pd.DataFrame:
    """Rows of (seed, method, layer, validation, test) on one task; no layer, no validation."""
    found = []
    for seed, method, layer, validation, test in cells:
        about = {"task": "t", "method": method, "layer": layer, "seed": seed, "n": 10 + seed}
        for split, value in (("validation", validation), ("test", test)):
            if value is not None:
                ends = {"low": value - 0.1, "high": value + 0.3}
                found.append(about | ends | {"split": split, "score": FULL, "value": value})
                found.append(about | ends | {"split": split, "score": "log-probability"})
                found[-1]["value"] = -1.0
    return pd.DataFrame(found).astype({"layer": "Int64"})


TWO = rows(
    (0, "zero-shot", None, None, 0.1),
    (1, "zero-shot", None, None, 0.3),
    (0, "learned", 2, 0.8, 0.5),
    (0, "learned", 5, 0.4, 0.9),
    (1, "learned", 2, 0.2, 0.0),
    (1, "learned", 5, 0.6, 0.7),
    (0, "linear", 2, 0.3, 1.0),
    (1, "linear", 2, 0.9, 0.2),
)


def accuracy(table, **where):
    table = table[(table["split"] == "test") & (table["score"] == FULL)]
    for name, value in where.items():
        table = table[table[name] == value]
    (row,) = table.to_dict("records")
    return row


def test_scores_are_means_over_seeds():
    row = accuracy(over_seeds(TWO), method="learned", layer=5)
    assert row["value"] == pytest.approx(0.8)
    assert (row["low"], row["high"]) == pytest.approx((0.7, 1.1))
    assert (row["least"], row["most"], row["seeds"], row["n"]) == (0.7, 0.9, 2, 10)
    assert accuracy(over_seeds(TWO), method="zero-shot")["value"] == pytest.approx(0.2)


def test_a_cell_that_one_seed_lacks_is_the_mean_of_the_others():
    fewer = TWO[~((TWO["seed"] == 1) & (TWO["layer"] == 5))]
    row = accuracy(over_seeds(fewer), method="learned", layer=5)
    assert (row["value"], row["seeds"]) == (0.9, 1)


def test_each_seed_chooses_its_layer_on_its_own_validation_split():
    row = accuracy(best_layers(TWO), method="learned")
    assert row["value"] == pytest.approx((0.5 + 0.7) / 2)
    assert row["layers"] == "2, 5"
    assert pd.isna(row["layer"])


def test_each_seed_chooses_its_vector_on_its_own_validation_split():
    row = accuracy(best_vectors(TWO))
    assert row["value"] == pytest.approx((0.5 + 0.2) / 2)
    assert row["vectors"] == [("learned", 2), ("linear", 2)]


def test_of_one_seed_best_layers_are_those_of_the_comparison():
    one = TWO[TWO["seed"] == 0].reset_index(drop=True)
    columns = ["task", "method", "layer", "score", "value", "low", "high", "n"]
    own = best_layers(one)[columns].sort_values(columns, ignore_index=True)
    expected = MethodComparison(rows=one).best()[columns].sort_values(columns, ignore_index=True)
    pd.testing.assert_frame_equal(own, expected)


def test_without_a_validation_score_there_is_no_best_vector():
    assert best_vectors(TWO[TWO["method"] == "zero-shot"]).empty


def test_a_cell_that_stands_twice_in_a_seed_is_refused():
    with pytest.raises(InvalidInput, match="stands in two"):
        over_seeds(pd.concat([TWO, TWO.tail(1)]))
