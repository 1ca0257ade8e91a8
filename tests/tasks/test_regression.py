"""Regression tasks: their text, their functions, their splits."""

import random
import re

import jaxtyping
import numpy as np
import pytest

from mechtv.errors import InvalidInput
from mechtv.seeds import python_rng
from mechtv.tasks.regression import regression_function, regression_task

KINDS = ("linear", "relu")
ROUNDING = 0.5e-4 + 1e-12


@pytest.fixture
def unchecked():
    """Without the type checks of the tests, which come before our own."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def inputs(task):
    """The numbers as they stand in the text."""
    return np.array([[float(x) for x in e.fields["x"][1:-1].split(",")] for e in task.examples])


def answers(task):
    return np.array([float(example.answer) for example in task.examples])


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_that_of_the_paper(kind):
    task = regression_task(kind, hidden=5, n=50)
    number = r"-?\d+\.\d{4}"
    form = re.compile(rf"x: \[{number}(, {number}){{5}}\]\ny: {number}")
    texts = [task.template.demonstration(example) for example in task.examples]
    assert all(form.fullmatch(text) for text in texts)
    assert not any("-0.0000" in text for text in texts)
    assert task.template.query(task.examples[0]).endswith("]\ny:")
    assert task.labels is None
    assert "6 numbers" in task.description


def test_tiny_negative_numbers_are_a_plain_zero():
    drawn = python_rng(577, "inputs of regression-linear")
    assert any(-0.5e-4 < drawn.gauss(0, 1) < 0 for _ in range(18))
    task = regression_task("linear", n=3, seed=577)
    assert any(" 0.0000" in example.fields["x"] for example in task.examples)
    assert not any("-0.0000" in example.fields["x"] for example in task.examples)


@pytest.mark.parametrize("seed", [0, 3])
def test_answers_of_the_linear_kind_are_one_weight_vector_times_the_text(seed):
    task = regression_task("linear", seed=seed, n=200)
    x, y = inputs(task), answers(task)
    w, *_ = np.linalg.lstsq(x[:100], y[:100], rcond=None)
    np.testing.assert_allclose(x[100:] @ w, y[100:], atol=1e-3)
    function = regression_function("linear", seed=seed)
    np.testing.assert_allclose([function(e) for e in np.eye(6)], w, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_the_function_of_the_numbers_in_the_text(kind):
    task = regression_task(kind, dimension=4, hidden=7, seed=2, n=60)
    function = regression_function(kind, dimension=4, hidden=7, seed=2)
    wanted = np.array([function(x) for x in inputs(task)])
    np.testing.assert_allclose(answers(task), wanted, atol=ROUNDING, rtol=0)


def test_the_relu_kind_is_a_sum_of_as_many_terms_as_asked():
    """Along a line it is piecewise linear, and each term bends it at most once."""
    direction, start = np.array([1.0, 0.3, -0.5]), np.array([0.2, -0.4, 0.1])
    line = np.linspace(-20, 20, 4001)
    for hidden in (1, 3, 6):
        function = regression_function("relu", dimension=3, hidden=hidden)
        values = np.array([function(start + t * direction) for t in line])
        bends = np.abs(np.diff(values, 2)) > 1e-9
        # a bend between two points of the grid shows in one or two second differences
        runs = int(bends[0]) + int((np.diff(bends.astype(int)) == 1).sum())
        assert 1 <= runs <= hidden
    assert runs > 3


def test_the_relu_kind_scales_with_its_input_and_its_odd_part_is_linear():
    function = regression_function("relu")
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 6))
    assert function(np.zeros(6)) == 0
    assert function(2.5 * a) == pytest.approx(2.5 * function(a))

    def odd(x):
        return function(x) - function(-x)

    assert odd(a + b) == pytest.approx(odd(a) + odd(b))
    assert abs(function(a + b) - function(a) - function(b)) > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_square_over_functions_is_the_squared_norm_of_the_input(kind):
    x = np.array([0.5, -1.0, 2.0])
    squares = [
        regression_function(kind, dimension=3, hidden=10, seed=seed)(x) ** 2 for seed in range(600)
    ]
    assert np.mean(squares) == pytest.approx(x @ x, rel=0.2)


@pytest.mark.parametrize("kind", KINDS)
def test_splits_do_not_overlap_and_have_their_sizes(kind):
    splits = regression_task(kind, hidden=3).splits()
    parts = [{e.key for e in part} for part in (splits.train, splits.validation, splits.test)]
    assert [len(part) for part in parts] == [600, 200, 200]
    assert len(set.union(*parts)) == 1000


def test_inputs_are_distinct_even_where_they_would_collide():
    task = regression_task("linear", dimension=1, n=2000)
    rng = python_rng(0, "inputs of regression-linear")
    assert len({round(rng.gauss(0, 1), 4) for _ in range(2000)}) < 2000, "some would"
    assert len({example.key for example in task.examples}) == len(task.examples) == 2000


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_depends_on_its_seed_alone(kind):
    random.seed(1)
    one = regression_task(kind, n=20, seed=5)
    random.seed(2)
    assert regression_task(kind, n=20, seed=5) == one
    assert regression_task(kind, n=30, seed=5).examples[:20] == one.examples
    other = regression_task(kind, n=20, seed=6)
    assert not {e.key for e in other.examples} & {e.key for e in one.examples}
    x = inputs(one)[0]
    assert regression_function(kind, seed=5)(x) != regression_function(kind, seed=6)(x)


def test_the_name_tells_every_setting_that_is_not_usual():
    assert regression_task("linear").name == "regression-linear"
    assert regression_task("linear", hidden=7).name == "regression-linear", "which it has not"
    assert regression_task("relu", hidden=7, n=9, seed=2).name == "regression-relu-hidden7-n9-seed2"
    assert regression_task("relu", hidden=1, n=1000).name == "regression-relu-hidden1"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"dimension": 0}, "dimension=0 is too small; use 1 or more"),
        ({"hidden": 0}, "hidden=0 is too small; use 1 or more"),
        ({"n": 2}, "n=2 examples cannot be drawn; use 3 to 10000"),
        ({"n": 10_001}, "n=10001 examples cannot be drawn"),
    ],
)
def test_sizes_that_cannot_be_are_refused(settings, sentence):
    with pytest.raises(InvalidInput, match=sentence):
        regression_task("relu", **settings)


@pytest.mark.usefixtures("unchecked")
def test_an_unknown_kind_is_refused():
    with pytest.raises(InvalidInput, match="kind='cubic' is unknown; use one of linear, relu"):
        regression_task("cubic")
