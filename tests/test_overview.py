"""The main job on a tiny model: complete, on one set of queries, nothing lost."""

import math
from dataclasses import replace

import pytest
from builders import tiny

import mechtv
from mechtv.overview import Overview, Setting, evenly_spread, run_overview

N = 6


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.fixture(scope="module")
def task() -> mechtv.Task:
    whole = mechtv.get_task("capitalize")
    return replace(whole, name="short", examples=whole.examples[:40])


@pytest.fixture(scope="module")
def overview(model, task) -> Overview:
    return run_overview(model, task, layers=(0, 2), shots=2, n=N)


def test_every_setting_is_scored_on_the_same_queries(overview: Overview) -> None:
    names = [(setting.name, setting.layer) for setting in overview.settings]
    assert names == [
        ("zero-shot", None),
        ("in-context", None),
        ("hidden_state", 0),
        ("learned", 0),
        ("hidden_state", 2),
        ("learned", 2),
    ]
    assert len({setting.evaluation.queries for setting in overview.settings}) == 1


def test_its_numbers_are_those_of_the_public_functions(overview: Overview, model, task) -> None:
    learned = overview["learned", 2]
    alone = mechtv.evaluate(model, task, learned.vector, n=N)
    assert learned.evaluation.log_probabilities == pytest.approx(alone.log_probabilities, abs=1e-10)
    for divergence in learned.divergences:
        again = mechtv.dntp(model, task, learned.vector, shots=2, over=divergence.over, n=N)
        assert divergence.per_query == pytest.approx(again.per_query, abs=1e-10)


def test_the_in_context_run_is_at_distance_zero_from_itself(overview: Overview) -> None:
    assert all((d.per_query == 0).all() for d in overview["in-context"].divergences)


def test_the_table_has_every_score_with_its_interval(overview: Overview) -> None:
    table = overview.table()
    assert len(table) == 6 * 5
    assert (table["low"] <= table["value"] + 1e-12).all()
    assert (table["value"] <= table["high"] + 1e-12).all()
    assert (table["n"] == N).all()


def test_the_best_layer_is_chosen_on_validation(overview: Overview) -> None:
    best = {
        layer: max(
            (point["validation_accuracy"], -point["validation_loss"])
            for point in overview["learned", layer].vector.card.curve
        )
        for layer in overview.layers
    }
    assert overview.best_layer == max(best, key=lambda layer: best[layer])


def test_the_comparison_is_paired(overview: Overview) -> None:
    table = overview.comparisons()
    assert list(table["layer"]) == [0, 2]
    difference = table["learned"] - table["hidden_state"]
    assert table["difference"].to_numpy() == pytest.approx(difference.to_numpy())


def test_examples_show_the_answers_of_every_setting(overview: Overview) -> None:
    columns = ["query", "answer", "zero-shot", "in-context", "hidden_state", "learned"]
    assert list(overview.examples.columns) == columns
    assert len(overview.examples) == N


def test_curves_name_their_layer(overview: Overview) -> None:
    curves = overview.curves()
    assert set(curves["layer"]) == {0, 2}
    assert math.isnan(curves["train_loss"].iloc[0])


def test_a_setting_that_does_not_exist_is_a_key_error(overview: Overview) -> None:
    with pytest.raises(KeyError):
        overview["learned", 1]


def test_what_was_finished_is_handed_over_before_an_interruption(model, task) -> None:
    finished: list[Setting] = []

    def keep(setting: Setting) -> None:
        finished.append(setting)
        if len(finished) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_overview(model, task, layers=(0,), shots=2, n=N, on_finished=keep)
    assert [setting.name for setting in finished] == ["zero-shot", "in-context", "hidden_state"]


@pytest.mark.parametrize(
    ("n_layers", "depths"),
    [(30, (3, 11, 18, 26)), (32, (4, 12, 20, 28)), (3, (0, 1, 2)), (1, (0,))],
)
def test_depths_lie_in_the_middle_of_equal_parts(n_layers: int, depths: tuple[int, ...]) -> None:
    assert evenly_spread(n_layers) == depths


def test_layers_are_checked_before_anything_runs(model, task, monkeypatch) -> None:
    monkeypatch.setattr("mechtv.overview.Scorer", None)
    with pytest.raises(mechtv.InvalidInput, match="layer=9 does not exist"):
        run_overview(model, task, layers=(1, 9), shots=2)
    with pytest.raises(mechtv.InvalidInput, match="distinct blocks"):
        run_overview(model, task, layers=(1, 1), shots=2)


def test_no_layers_is_refused(model, task) -> None:
    with pytest.raises(mechtv.InvalidInput, match=r"layers=\[\] must name"):
        run_overview(model, task, layers=(), shots=2)
