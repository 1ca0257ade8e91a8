import math
import webbrowser
from collections.abc import Callable

import plotly.graph_objects as go
import plotly.io
import pytest
from plots.fake import HIDDEN, LAYERS, LEARNED, curve, fake_overview

from mechtv import plots
from mechtv.errors import InvalidInput
from mechtv.overview import Overview
from mechtv.plots.distance import divergence_of
from mechtv.plots.training import kept_epoch

FIGURES = (
    plots.accuracy_by_layer,
    plots.training_curves,
    plots.dntp_bars,
    lambda overview: plots.dntp_bars(overview, over="labels"),
)


@pytest.fixture(scope="module")
def overview() -> Overview:
    return fake_overview()


def trace(figure: go.Figure, name: str) -> go.Scatter | go.Bar:
    (found,) = (t for t in figure.data if t.name == name)
    return found


@pytest.mark.parametrize("draw", FIGURES)
def test_figures_are_returned_and_neither_shown_nor_printed(
    draw: Callable[[Overview], go.Figure],
    overview: Overview,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a figure was shown")

    monkeypatch.setattr(plotly.io, "show", refuse)
    monkeypatch.setattr(webbrowser, "open", refuse)
    assert isinstance(draw(overview), go.Figure)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("draw", FIGURES)
def test_the_title_says_what_is_shown(
    draw: Callable[[Overview], go.Figure], overview: Overview
) -> None:
    title = draw(overview).layout.title
    for part in ("present-past", "smollm2-135m", "n = "):
        assert part in title.subtitle.text


@pytest.mark.parametrize("draw", FIGURES)
def test_one_depth_and_one_query_are_enough(draw: Callable[[Overview], go.Figure]) -> None:
    small = fake_overview(learned={0: 1.0}, hidden={0: 0.0}, in_context=1.0, n=1)
    assert draw(small).to_json()


def test_accuracies_stand_at_their_layers_with_their_intervals(overview: Overview) -> None:
    figure = plots.accuracy_by_layer(overview)
    for name, label, values in (
        ("learned", "Learned vector", LEARNED),
        ("hidden_state", "Hidden-state vector", HIDDEN),
    ):
        drawn = trace(figure, label)
        assert tuple(drawn.x) == LAYERS
        assert drawn.y == pytest.approx(list(values.values()))
        for i, layer in enumerate(LAYERS):
            e = overview[name, layer].evaluation.accuracy
            assert drawn.y[i] + drawn.error_y.array[i] == pytest.approx(e.high)
            assert drawn.y[i] - drawn.error_y.arrayminus[i] == pytest.approx(e.low)
            assert f"{e.value:.2f} [{e.low:.2f}, {e.high:.2f}]" in drawn.hovertext[i]
            assert f"n = {e.n}" in drawn.hovertext[i]


@pytest.mark.parametrize(
    ("name", "label"), [("in-context", "In context (8 shots)"), ("zero-shot", "Zero-shot")]
)
def test_settings_without_a_depth_are_lines_with_bands(
    overview: Overview, name: str, label: str
) -> None:
    figure = plots.accuracy_by_layer(overview)
    e = overview[name].evaluation.accuracy
    line, band = trace(figure, label), trace(figure, f"{label}, 95 % interval")
    assert set(line.y) == {e.value}
    assert (min(line.x), max(line.x)) == tuple(figure.layout.xaxis.range)
    assert (min(band.y), max(band.y)) == (e.low, e.high)
    assert (line.legendgroup, band.showlegend) == (band.legendgroup, False)


def test_the_legend_names_each_setting_once_and_in_the_same_order(overview: Overview) -> None:
    for figure in (plots.accuracy_by_layer(overview), plots.dntp_bars(overview)):
        shown = [t for t in figure.data if t.showlegend is not False]
        names = [t.name for t in sorted(shown, key=lambda t: t.legendrank)]
        assert names[:2] == ["Learned vector", "Hidden-state vector"]
        assert names[-1] == "Zero-shot"
        assert len(set(names)) == len(names)


def test_training_has_one_colour_and_three_curves_a_depth(overview: Overview) -> None:
    figure = plots.training_curves(overview)
    curves = overview.curves()
    colors = set()
    for layer in LAYERS:
        rows = curves[curves["layer"] == layer]
        accuracy = trace(figure, f"Layer {layer}")
        train = trace(figure, f"Layer {layer}, train loss")
        validation = trace(figure, f"Layer {layer}, validation loss")
        assert accuracy.y == pytest.approx(rows["validation_accuracy"].tolist())
        assert validation.y == pytest.approx(rows["validation_loss"].tolist())
        assert train.y == pytest.approx(rows["train_loss"].dropna().tolist())
        assert (accuracy.x[0], train.x[0]) == (0, 1), "epoch 0 has no training loss"
        assert accuracy.line.color == train.line.color == validation.line.color
        assert accuracy.yaxis != validation.yaxis
        assert train.yaxis == validation.yaxis
        assert train.line.dash != validation.line.dash
        colors.add(accuracy.line.color)
    assert len(colors) == len(LAYERS)
    assert "nats" in figure.layout.yaxis2.title.text


def test_the_kept_epoch_is_the_large_marker(overview: Overview) -> None:
    drawn = trace(plots.training_curves(overview), "Layer 26")
    kept = kept_epoch(overview.curves().query("layer == 26"))
    assert drawn.x[drawn.marker.size.index(max(drawn.marker.size))] == kept == 7


def test_the_kept_epoch_is_decided_as_in_training() -> None:
    """Best accuracy, then lowest loss, then the first."""
    frame = fake_overview().curves().query("layer == 3").copy()
    frame["validation_accuracy"], frame["validation_loss"] = 0.5, 2.0
    assert kept_epoch(frame) == 0
    frame.loc[frame["epoch"] == 4, "validation_loss"] = 1.0
    assert kept_epoch(frame) == 4
    frame.loc[frame["epoch"] == 2, "validation_accuracy"] = 0.6
    assert kept_epoch(frame) == 2


@pytest.mark.parametrize("over", ["vocabulary", "labels"])
def test_dntp_bars_are_the_means_over_the_chosen_tokens(overview: Overview, over: str) -> None:
    figure = plots.dntp_bars(overview, over=over)  # type: ignore[arg-type]
    bars = trace(figure, "Learned vector")
    index = ["labels", "vocabulary"].index(over)
    estimates = [overview["learned", layer].divergences[index].estimate for layer in LAYERS]
    assert bars.y == pytest.approx([e.value for e in estimates])
    assert bars.error_y.array == pytest.approx([e.high - e.value for e in estimates])
    assert tuple(figure.layout.xaxis.ticktext) == tuple(map(str, LAYERS))
    assert set(trace(figure, "Zero-shot").y) == {overview["zero-shot"].divergences[index].value}
    assert "nats" in figure.layout.yaxis.title.text
    assert "0: same next-token distribution" in figure.layout.title.subtitle.text
    assert "nats" in bars.hovertext[0]


def test_dntp_over_other_tokens_is_an_error_that_names_what_there_is(overview: Overview) -> None:
    with pytest.raises(InvalidInput, match="over 'words'; it has 'labels', 'vocabulary'"):
        divergence_of(overview["zero-shot"], "words")


def test_the_fake_curve_is_one_that_training_could_have_made() -> None:
    assert all(math.isfinite(value) for row in curve(0.5) for value in row.values())
