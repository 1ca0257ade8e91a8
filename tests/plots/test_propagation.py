"""Figures of fitted maps and of their rotations, from results made by hand: no model is needed."""

import dataclasses
import webbrowser

import numpy as np
import plotly.graph_objects as go
import plotly.io
import pytest
import torch

from mechtv.analysis.answers import Answers
from mechtv.analysis.polar import COSINE_Q, STRETCH
from mechtv.analysis.propagation import FULL, MAPPED, MEAN_EFFECT, ZERO_SHOT, Propagation
from mechtv.analysis.ridge import HeldOut
from mechtv.analysis.rotation import RotationStretch, rotation_stretch
from mechtv.errors import InvalidInput
from mechtv.evaluation.provenance import Provenance
from mechtv.plots.propagation import propagation_accuracy, propagation_r2
from mechtv.plots.rotation import rotation_by_layer, singular_spectrum

D, N_HELD_OUT, N_QUERIES = 24, 30, 50
LAYERS = (3, 11, 18, 26)


EXACTLY = torch.eye(4, dtype=torch.float64)


def fake(layer=3, *, task="present-past", model="smollm2-135m", rank=D, reflects=False, **changes):
    """A fit that is better the later the layer, with answers to match."""
    rng = np.random.default_rng(layer)
    noise = 2.0 / (1 + layer)
    y = torch.from_numpy(rng.normal(size=(N_HELD_OUT, D)) + 2)
    matrix = torch.from_numpy(rng.normal(size=(D, D)) / 5 + np.eye(D))
    if (float(torch.linalg.det(matrix)) < 0) != reflects:
        matrix[:, 0] = -matrix[:, 0]
    scores = HeldOut.of(y, y + noise * torch.from_numpy(rng.normal(size=(N_HELD_OUT, D))))
    accuracy = {ZERO_SHOT: 0.0, FULL: 0.6, MAPPED: 0.02 * layer, MEAN_EFFECT: 0.02 * layer + 0.05}
    return Propagation(
        **{
            "task": task,
            "layer": layer,
            "theta": torch.from_numpy(rng.normal(size=D)),
            "matrix": matrix,
            "rank": rank,
            "spread": (0.1,),
            "ridge": 1.0,
            "n_perturbations": 2 * D,
            "n": 32,
            "n_held_out_queries": 16,
            "split": "test",
            "effect": torch.zeros(D),
            "held_out": scores,
            "same_queries": HeldOut.of(EXACTLY, EXACTLY),
            "answers": {name: answers(share) for name, share in accuracy.items()},
            "provenance": Provenance(model=model, template="t", seed=0),
            **changes,
        }
    )


def answers(share):
    correct = np.arange(N_QUERIES) < share * N_QUERIES
    return Answers(
        correct=correct,
        correct_label=None,
        log_probability=np.where(correct, -0.5, -6.0),
        logit_difference=np.where(correct, 2.0, -3.0),
    )


def turned(*fits):
    return rotation_stretch(list(fits) or [fake(layer) for layer in LAYERS])


FIGURES = {
    "R²": lambda fits: propagation_r2(fits),
    "accuracy": lambda fits: propagation_accuracy(fits),
    "turn": lambda fits: rotation_by_layer(rotation_stretch(fits)),
    "spectrum": lambda fits: singular_spectrum(rotation_stretch(fits)),
}


def by_name(figure):
    return {trace.name: trace for trace in figure.data if trace.name}


@pytest.mark.parametrize("figure", FIGURES.values(), ids=FIGURES)
def test_figures_are_returned_and_neither_shown_nor_printed(figure, capfd, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a figure was shown")

    monkeypatch.setattr(plotly.io, "show", refuse)
    monkeypatch.setattr(webbrowser, "open", refuse)
    assert isinstance(figure([fake(layer) for layer in LAYERS]), go.Figure)
    assert isinstance(figure([fake()]), go.Figure)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("figure", FIGURES.values(), ids=FIGURES)
def test_subtitles_name_task_and_model_and_hold_no_markup_of_users(figure):
    subtitle = figure(
        [fake(model="<b>model", layer=layer) for layer in LAYERS]
    ).layout.title.subtitle
    assert "present-past" in subtitle.text
    assert "&lt;b&gt;model" in subtitle.text


@pytest.mark.parametrize("figure", FIGURES.values(), ids=FIGURES)
def test_a_layer_that_is_there_twice_and_nothing_at_all_are_refused(figure):
    with pytest.raises(InvalidInput, match="'present-past' at layer 3 is there twice"):
        figure([fake(3), fake(3)])
    with pytest.raises(InvalidInput, match=r"no (fits|maps)"):
        figure([])


def test_no_turns_are_refused():
    for figure in (rotation_by_layer, singular_spectrum):
        with pytest.raises(InvalidInput, match="no maps to draw"):
            figure(RotationStretch(turns=()))


def test_r2_is_drawn_by_layer_with_intervals():
    fits = [fake(layer) for layer in LAYERS[::-1]]
    figure = propagation_r2(fits)
    lines = by_name(figure)
    plain, centred = lines["From no effect"], lines["Of the variation (centred)"]
    for trace, value in ((plain, lambda f: f.r2), (centred, lambda f: f.r2_centred)):
        estimates = [value(fit) for fit in fits[::-1]]
        assert list(trace.x) == list(LAYERS)
        np.testing.assert_allclose(trace.y, [e.value for e in estimates])
        np.testing.assert_allclose(trace.error_y.array, [e.high - e.value for e in estimates])
    assert centred.y[0] < plain.y[0]
    text = figure.layout.title.subtitle.text
    assert "spread 0.1" in text
    assert f"{N_HELD_OUT} other perturbations over n = 16 test queries" in text
    assert "n = 32 training queries" in text


def test_what_is_far_below_zero_stays_in_sight_and_says_its_value():
    bad = HeldOut.of(torch.eye(4).double(), -5 * torch.eye(4).double())
    trace = by_name(propagation_r2(fake(held_out=bad)))["From no effect"]
    assert trace.y == (-0.5,)
    assert "−35.00" in trace.hovertext[0]
    top = trace.y[0] + trace.error_y.array[0]
    assert top <= -0.5  # its interval, all below, is not drawn as if it reached up


def test_accuracy_compares_the_four_settings():
    lines = by_name(propagation_accuracy([fake(layer) for layer in LAYERS]))
    assert lines["θ at its layer"].y == pytest.approx((0.6,) * 4)
    assert lines["Wθ at the end"].y == pytest.approx(tuple(0.02 * layer for layer in LAYERS))
    assert lines["Zero-shot"].y == (0, 0, 0, 0)
    looks = {(t.line.dash, t.marker.symbol) for t in lines.values()}
    assert len(looks) == 4
    assert f"n = {N_QUERIES}" in lines["Wθ at the end"].hovertext[0]


def test_other_scores_have_their_own_axis_and_unknown_ones_are_named():
    nats = propagation_accuracy(fake(), "log-probability")
    assert any("nats" in note.text for note in nats.layout.annotations)
    assert propagation_accuracy(fake(), "logit difference").data
    with pytest.raises(InvalidInput, match="no score 'accuracy, label-restricted'; it has"):
        propagation_accuracy(fake(), "accuracy, label-restricted")


def test_tasks_have_panels_and_a_span_is_said_to_be_none():
    fits = [fake(layer, task=task) for task in ("one", "two") for layer in (3, 11)]
    figure = propagation_r2([*fits, fake(18, task="two", rank=D - 3)])
    assert {note.text for note in figure.layout.annotations} >= {"one", "two"}
    assert "No full map at layer 18" in figure.layout.title.subtitle.text
    assert "No full map" not in propagation_r2(fits).layout.title.subtitle.text


def test_turn_and_stretch_stand_beside_random_vectors():
    result = turned()
    drawn = rotation_by_layer(result).data
    for column, measure in enumerate((COSINE_Q, STRETCH)):
        band, middle, line = drawn[3 * column : 3 * column + 3]
        assert list(line.x) == list(middle.x) == list(LAYERS)
        np.testing.assert_allclose(line.y, [t.values[measure] for t in result.turns])
        ranges = np.array([t.null_range(measure) for t in result.turns])
        np.testing.assert_allclose(middle.y, ranges[:, 0])
        np.testing.assert_allclose(band.y, [*ranges[:, 2], *ranges[::-1, 1]])
        assert "random vectors" in line.hovertext[0]


def test_reflections_are_marked():
    figure = rotation_by_layer(turned(fake(3), fake(11, reflects=True)))
    line = next(trace for trace in figure.data if trace.name)
    assert list(line.marker.symbol) == ["circle", "circle-open"]
    assert "with a reflection" in line.hovertext[1]
    assert "Open markers" in figure.layout.title.subtitle.text
    assert "Open markers" not in rotation_by_layer(turned(fake(3))).layout.title.subtitle.text


def test_two_kinds_of_map_are_told_apart():
    other = [dataclasses.replace(fake(layer), name="integrated") for layer in LAYERS]
    result = turned(*(fake(layer) for layer in LAYERS), *other)
    lines = by_name(rotation_by_layer(result))
    assert set(lines) == {"Fitted map", "Integrated Jacobian"}
    assert len({line.line.dash for line in lines.values()}) == 2
    assert len(by_name(singular_spectrum(result))) == 2 * len(LAYERS)


def test_spectra_fall_on_a_logarithmic_axis():
    result = turned()
    figure = singular_spectrum(result)
    assert figure.layout.yaxis.type == "log"
    lines = by_name(figure)
    assert len(lines) == len(LAYERS)
    for turn, (name, line) in zip(result.turns, lines.items(), strict=True):
        assert name == f"Layer {turn.layer} ({turn.polar.entropy_rank:.0f})"
        np.testing.assert_allclose(line.y, turn.polar.singular_values)
    assert len({line.line.color for line in lines.values()}) == len(LAYERS)
