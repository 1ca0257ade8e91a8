"""The figure of the linearity battery, from numbers made by hand: no model is needed."""

import webbrowser

import plotly.graph_objects as go
import plotly.io
import pytest

from mechtv.analysis.linearity import Linearity, Score
from mechtv.analysis.linearity_battery import PREDICTIONS
from mechtv.errors import UnknownName
from mechtv.evaluation.intervals import Estimate
from mechtv.evaluation.provenance import Provenance
from mechtv.plots.linearity import LOWEST, linearity

ALPHAS = (0.0, 0.5, 1.0, 1.5)
R2 = {"J(0) θ": -3.08, "J(θ) θ": -0.13, "path average": 1.0, "mean shift": 0.81}
ACCURACY = "accuracy, full vocabulary"


def estimate(value: float) -> Estimate:
    return Estimate(value=value, low=value - 0.1, high=value + 0.05, n=48)


def fake(vectors: tuple[str, ...] = ("theta", "random"), model: str = "smollm2-135m") -> Linearity:
    """Numbers like those of the default model."""
    numbers = []
    for vector in vectors:
        for alpha in ALPHAS:
            place = ("scaling", "alpha θ", alpha, vector)
            numbers += [(*place, "relative norm", alpha), (*place, ACCURACY, 0.2 * alpha)]
            if alpha:
                numbers += [(*place, "norm ratio", 1.6 - alpha / 2), (*place, "cosine", 0.9)]
        for name in PREDICTIONS:
            place = ("first order", name, None, vector)
            numbers += [(*place, ACCURACY, 0.3), (*place, "accuracy, label-restricted", 0.6)]
            numbers += [(*place, "R²", R2[name])] if name in R2 else []
    keys = ("part", "name", "alpha", "vector", "score")
    return Linearity(
        task="present-past",
        layer=11,
        scores=tuple(
            Score(**dict(zip(keys, row[:-1], strict=True)), estimate=estimate(row[-1]))
            for row in numbers
        ),
        nodes=8,
        n_null=3 if "random" in vectors else 0,
        n=48,
        n_others=48,
        split="test",
        centred=False,
        provenance=Provenance(model=model, revision="1", weights="raw", template="t", seed=0),
    )


def traces(figure: go.Figure, axis: str) -> dict[str, go.Scatter | go.Bar]:
    return {trace.name: trace for trace in figure.data if (trace.xaxis or "x") == axis}


def test_the_figure_is_returned_and_neither_shown_nor_printed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a figure was shown")

    monkeypatch.setattr(plotly.io, "show", refuse)
    monkeypatch.setattr(webbrowser, "open", refuse)
    assert linearity(fake()).to_json()
    assert capfd.readouterr() == ("", "")


def test_the_title_says_what_is_shown_and_markup_of_users_stays_text() -> None:
    title = linearity(fake(model="<b>model")).layout.title
    assert "block 11" in title.text
    for part in ("present-past", "&lt;b&gt;model", "n = 48 test", "3 vectors", "8 points"):
        assert part in title.subtitle.text


@pytest.mark.parametrize(("axis", "value"), [("x", lambda a: 1.6 - a / 2), ("x2", lambda a: 0.9)])
def test_the_curves_run_over_the_scales_that_have_an_effect(axis, value) -> None:
    found = traces(linearity(fake()), axis)
    assert set(found) == {"Vector θ", "Random vectors"}
    for trace in found.values():
        assert list(trace.x) == [0.5, 1.0, 1.5]
        assert list(trace.y) == pytest.approx([value(alpha) for alpha in trace.x])
        assert list(trace.error_y.arrayminus) == pytest.approx([0.1] * 3)
        assert list(trace.error_y.array) == pytest.approx([0.05] * 3)
        assert "α = 0.5" in trace.hovertext[0]
        assert "n = 48" in trace.hovertext[0]
    looks = {(t.line.color, t.line.dash, t.marker.symbol) for t in found.values()}
    assert len(looks) == 2


def test_bars_are_the_predictions_between_the_two_runs() -> None:
    bars = traces(linearity(fake()), "x3")["Vector θ"]
    assert [name.replace("<br>", " ") for name in bars.x] == list(PREDICTIONS)
    assert list(bars.y) == [0.3] * len(PREDICTIONS)
    labels = traces(linearity(fake(), score="accuracy, label-restricted"), "x3")["Vector θ"]
    assert list(labels.y) == [0.6] * len(PREDICTIONS)


def test_a_fit_below_the_axis_is_cut_and_keeps_its_number() -> None:
    figure = linearity(fake())
    bars = traces(figure, "x4")["Vector θ"]
    assert list(bars.y) == [LOWEST, -0.13, 1.0, 0.81]
    assert list(bars.text) == ["−3.1", "", "", ""]
    assert bars.error_y.array[0] == bars.error_y.arrayminus[0] == 0
    assert "−3.08 [−3.18, −3.03]" in bars.hovertext[0]
    assert figure.layout.yaxis4.range[0] < LOWEST


def test_without_random_vectors_there_is_one_of_each() -> None:
    figure = linearity(fake(vectors=("theta",)))
    assert [trace.name for trace in figure.data] == ["Vector θ"] * 4
    assert "random" not in figure.layout.title.subtitle.text


def test_the_legend_names_each_vector_once() -> None:
    figure = linearity(fake())
    shown = [trace.name for trace in figure.data if trace.showlegend is not False]
    assert shown == ["Vector θ", "Random vectors"]


def test_an_unknown_score_is_named() -> None:
    with pytest.raises(UnknownName, match="accuracy, exact"):
        linearity(fake(), score="accuracy, exact")
