"""Numbers read from text, and their errors, against formulas and greedy decoding by hand."""

import math

import numpy as np
import pytest
import torch
from builders import D_MODEL, tiny
from evaluation.invented import model_of, task_of
from evaluation.naive import greedy, row_of

from mechtv.errors import InvalidInput
from mechtv.evaluation.intervals import mean, share
from mechtv.evaluation.regression import BASELINE, Regression, evaluate_regression, read_number
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.regression import regression_task
from mechtv.tasks.tokens import fragment_ids
from mechtv.vectors import Add, Card, Edit, Replace, Site, TaskVector

TASK = regression_task("linear", dimension=1, n=100)


def vector_of(acts_on="both"):
    value = 2 * torch.randn(D_MODEL, generator=torch.Generator().manual_seed(0))
    edit = Edit(site=Site(layer=1), operation=Add(value=value.double()))
    return TaskVector(edits=(edit,), card=Card(method="by hand"), acts_on=acts_on)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (" 0.1234\nx: [5.0", 0.1234),
        ("-1.2000", -1.2),
        (" −1.25", -1.25),
        (" –3", -3.0),
        ("+2", 2.0),
        (" .5 or 7", 0.5),
        ("-.5", -0.5),
        ("4.", 4.0),
        ("1e-3", 0.001),
        ("2.5E+2", 250.0),
        ("−2e−1", -0.2),
        ("3e", 3.0),
        ("7 e5", 7.0),
        ("[0.5, -0.25]", 0.5),
        ("about 12 or 13", 12.0),
        ("1-2", 1.0),
        ("x1 = 3.5", 3.5),
        ("a-4", 4.0),
        ("1,234.5", 1.0),
        ("00012", 12.0),
        ("-0.0000", 0.0),
    ],
)
def test_the_first_number_of_the_first_line_is_read(text, number):
    assert read_number(text) == number


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "none", "-", ".", "- . e5", "x1", "v1.5", "\n3.5", "no\n3", "a\r4"),
        *("nan", "inf", "Infinity", "1e101", "-1e999", "9" * 120, "…", "²", "٣"),
    ],
)
def test_a_line_without_a_number_is_read_as_none(text):
    assert math.isnan(read_number(text))


@pytest.mark.parametrize(
    ("family", "shots", "demonstrations", "vector"),
    [
        ("llama", 0, "per query", None),
        ("llama", 2, "fixed", "both"),
        ("gpt2", 2, "per query", "prompt"),
        ("gemma2", 0, "per query", "new"),
    ],
)
def test_predictions_equal_greedy_decoding_by_hand(family, shots, demonstrations, vector):
    model, vector = model_of(family), None if vector is None else vector_of(vector)
    about = {"shots": shots, "demonstrations": demonstrations, "n": 5}
    found = evaluate_regression(model, TASK, vector, **about, batch_size=2)
    prompts = Prompts.of(model, TASK, **about)
    for row in range(5):
        ids = greedy(model, row_of(prompts, row), 15, vector)
        end = next((place for place, token in enumerate(ids) if token < 3), 15)  # a special one
        assert found.texts[row] == model.tokenizer.decode(ids[:end])
        np.testing.assert_equal(found.predictions[row], read_number(found.texts[row]))
    assert found.queries == tuple(example.key for example in TASK.split("test", n=5))
    assert found.answers.tolist() == [float(e.answer) for e in TASK.split("test", n=5)]
    assert (found.setting, found.new_tokens) == (_setting(vector, shots), 15)


def _setting(vector, shots):
    return "by hand" if vector else ("in-context" if shots else "zero-shot")


def test_the_number_that_a_vector_writes_is_the_prediction():
    model = model_of()
    (seven,) = fragment_ids(model, "7")
    value = 3 * model.W_U[:, seven].detach().clone()
    edit = Edit(site=Site(layer=2, component="resid_post"), operation=Replace(value=value))
    vector = TaskVector(edits=(edit,), card=Card(method="sevens"), acts_on="both")
    found = evaluate_regression(model, TASK, vector, n=3, new_tokens=2)
    assert found.predictions.tolist() == [77.0] * 3
    assert found.mae.value == pytest.approx(np.mean(np.abs(77 - found.answers)))
    assert found.unparsed.value == 0


def test_twelve_shots_are_usual_without_a_vector_and_none_with_one():
    model = tiny("llama", max_position_embeddings=512)
    about = {"n": 2, "new_tokens": 2}
    plain = evaluate_regression(model, TASK, **about)
    assert (plain.shots, plain.setting) == (12, "in-context")
    assert plain.texts == evaluate_regression(model, TASK, shots=12, **about).texts
    vector = vector_of()
    under = evaluate_regression(model, TASK, vector, **about)
    assert (under.shots, under.setting) == (0, "by hand")
    assert under.texts == evaluate_regression(model, TASK, vector, shots=0, **about).texts


def invented(predictions, answers, training_mean=0.25, **other):
    n = len(answers)
    settings = {
        "task": "invented",
        "setting": "a test",
        "shots": 2,
        "split": "test",
        "new_tokens": 15,
        "queries": tuple((str(i),) for i in range(n)),
        "texts": ("",) * n,
        **other,
    }
    return Regression(
        answers=np.array(answers),
        predictions=np.array(predictions),
        training_mean=training_mean,
        **settings,
    )


def test_errors_are_means_over_all_queries_and_no_number_counts_as_zero():
    found = invented([1.0, math.nan, -2.0, 0.5], [0.5, 3.0, -2.0, -0.5])
    assert found.errors.tolist() == [0.5, -3.0, 0.0, 1.0]
    assert found.mse.value == pytest.approx((0.25 + 9 + 0 + 1) / 4)
    assert found.rmse.value == pytest.approx(math.sqrt((0.25 + 9 + 0 + 1) / 4))
    assert found.mae.value == pytest.approx((0.5 + 3 + 0 + 1) / 4)
    assert found.unparsed == share(np.array([False, True, False, False]))
    assert found.mse == mean(np.array([0.25, 9.0, 0.0, 1.0]))
    assert found.rmse.low == pytest.approx(math.sqrt(found.mse.low))
    assert found.rmse.high == pytest.approx(math.sqrt(found.mse.high))
    assert found.mae.n == found.unparsed.n == 4


def test_nothing_readable_is_the_error_of_predicting_zero():
    found = invented([math.nan] * 3, [1.0, -2.0, 2.0])
    assert found.mse.value == pytest.approx(3.0)
    assert found.unparsed.value == 1.0
    assert found.table().value.notna().all()


def test_the_baseline_predicts_the_mean_of_the_training_answers():
    found = evaluate_regression(model_of(), TASK, shots=0, n=5, seed=3, new_tokens=1)
    splits = TASK.splits(3)
    assert found.training_mean == pytest.approx(np.mean([float(e.answer) for e in splits.train]))
    errors = [found.training_mean - float(e.answer) for e in splits.test[:5]]
    rows = found.table().query("setting == @BASELINE").set_index("score").value
    assert rows["MSE"] == pytest.approx(np.mean(np.square(errors)))
    assert rows["RMSE"] == pytest.approx(np.sqrt(np.mean(np.square(errors))))
    assert rows["MAE"] == pytest.approx(np.mean(np.abs(errors)))


def test_the_table_has_one_row_a_score_and_the_baseline():
    table = evaluate_regression(model_of(), TASK, shots=1, n=5, new_tokens=3).table()
    assert list(table.score) == ["MSE", "RMSE", "MAE", "no number", "MSE", "RMSE", "MAE"]
    assert list(table.setting) == ["in-context"] * 4 + [BASELINE] * 3
    assert list(table.shots) == [1] * 4 + [0] * 3
    assert (table.n == 5).all()
    assert ((table.low <= table.value) & (table.value <= table.high)).all()
    assert set(table.template) == {"x: {x}\ny: {answer}"}


def test_one_query_has_errors_but_no_interval():
    found = evaluate_regression(model_of(), TASK, shots=0, n=1, new_tokens=1)
    assert math.isfinite(found.rmse.value)
    assert math.isnan(found.rmse.low)


def test_a_comparison_is_paired_and_of_one_error_minus_the_other():
    answers = [0.0] * 6
    one, other = invented([2.0] * 6, answers), invented([1.0, 1.0, 1.0, 1.0, 1.0, -3.0], answers)
    assert one.compare(other).difference.value == pytest.approx((5 * 3 - 5) / 6)
    assert one.compare(other, "MAE").difference.value == pytest.approx((5 * 1 - 1) / 6)
    assert one.compare(other).test == "Wilcoxon signed-rank"
    with pytest.raises(InvalidInput, match="scored on different queries"):
        one.compare(invented([1.0], [1.0]))


def test_the_same_seed_gives_the_same_bits_and_batches_do_not_matter():
    model, vector = model_of(), vector_of()
    one, *others = (
        evaluate_regression(model, TASK, vector, n=4, batch_size=size) for size in (32, 32, 3)
    )
    for other in others:
        assert other.texts == one.texts
        assert other.table().equals(one.table())
    seeded = TaskVector(edits=vector.edits, card=Card(method="by hand", seed=4))
    assert evaluate_regression(model, TASK, seeded, n=2).queries == tuple(
        example.key for example in TASK.split("test", n=2, seed=4)
    )


def test_what_cannot_be_scored_is_refused():
    model = model_of()
    with pytest.raises(InvalidInput, match=r"'invented' are not all numbers \('\w+' is none\)"):
        evaluate_regression(model, task_of())
    with pytest.raises(InvalidInput, match="new_tokens=0 leaves nothing to read; use 1 or more"):
        evaluate_regression(model, TASK, shots=0, new_tokens=0)
    with pytest.raises(InvalidInput, match=r"n=21 .*the test split .* holds 20"):
        evaluate_regression(model, TASK, n=21)
    with pytest.raises(InvalidInput, match="batch_size=0 is too small"):
        evaluate_regression(model, TASK, shots=0, batch_size=0)
    with pytest.raises(InvalidInput, match=r"new_tokens=120 exceed the model's context of 128"):
        evaluate_regression(model, TASK, shots=0, new_tokens=120)
    with pytest.raises(InvalidInput, match="the model's context holds 128; use fewer shots"):
        evaluate_regression(model, TASK)


@pytest.mark.usefixtures("unchecked")
def test_another_score_is_refused():
    with pytest.raises(InvalidInput, match="score='RMSE' cannot be compared; use 'MSE' or 'MAE'"):
        invented([1.0], [1.0]).compare(invented([1.0], [1.0]), "RMSE")


@pytest.mark.model
def test_the_real_model_goes_on_with_numbers(model):
    found = evaluate_regression(model, regression_task("linear"), shots=1, n=2)
    assert found.unparsed.value == 0
    assert all("\n" in text for text in found.texts), "fifteen tokens hold the whole number"
    assert found.rmse.value < 20
