"""Figures of the logit lens, of alignment and of diagnostics, from results made by hand."""

import re
import webbrowser
from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import plotly.io
import pytest
import torch

from mechtv.analysis.alignment import Alignment, AnswerSpan
from mechtv.analysis.diagnostics import CHANGE, SIZE, STATE, Change, Diagnostics
from mechtv.analysis.lens import LABELS, Readings
from mechtv.analysis.logit_lens import Lens
from mechtv.errors import InvalidInput
from mechtv.evaluation.provenance import Provenance
from mechtv.plots.diagnostics import alignment_bars, alignment_by_layer, diagnostics_panels
from mechtv.plots.lens import lens_curves, lens_tokens

DEPTHS, N, WIDTH = 9, 20, 64
TOKENS = (" jumped", "\n", "<b>&", "\xa0 ", "a token that is long")
ORIGIN = Provenance(model="smollm2-135m", revision="1", weights="raw", template="t", seed=0)


def readings(labels=True, rise=0.5, seed=0) -> Readings:
    """Scores that rise with depth."""
    rng = np.random.default_rng(seed)
    depth = np.arange(DEPTHS)[:, None] / DEPTHS
    hits = rng.random((DEPTHS, N)) < rise * depth
    return Readings(
        correct=hits,
        correct_label=hits if labels else None,
        log_probability=-9 + 8 * rise * depth + rng.normal(0, 1, (DEPTHS, N)),
        logit_difference=-3 + 8 * rise * depth + rng.normal(0, 1, (DEPTHS, N)),
        rank=(1 + rng.integers(0, 900, (DEPTHS, N)) * (1 - rise * depth)).astype(int),
    )


def strips() -> list[dict[str, object]]:
    return [
        {"state": state, "depth": depth, "rank": rank, "token": token, "logit": 9.0 - rank + depth}
        for state in ("plain", "injected", "theta")
        for depth in (range(DEPTHS) if state != "theta" else (3,))
        for rank, token in enumerate(TOKENS, start=1)
    ]


@cache
def fake_lens(labels=True) -> Lens:
    return Lens(
        task="<i>trec",
        setting="learned",
        split="test",
        layer=3,
        queries=tuple((f"word {i}",) for i in range(N)),
        plain=readings(labels, rise=0.2),
        injected=readings(labels, rise=0.9, seed=1),
        tokens=pd.DataFrame(strips()),
        provenance=ORIGIN,
    )


def span(dim=6) -> AnswerSpan:
    basis = torch.eye(WIDTH, dtype=torch.float64)[:dim]
    return AnswerSpan(basis=basis, n_tokens=dim, gain=True, centred=False)


@cache
def fake_diagnostics(layers=(2, 5), labels=True) -> Diagnostics:
    rng = np.random.default_rng(0)
    changes = tuple(
        Change(
            layer=layer,
            setting="learned",
            readings=readings(labels, rise=0.9, seed=layer),
            state=rng.random((DEPTHS, N)),
            change=rng.random((DEPTHS - layer, N)),
            size=1 + rng.random((DEPTHS - layer, N)),
        )
        for layer in layers
    )
    return Diagnostics(
        task="<i>trec",
        split="test",
        queries=tuple((f"word {i}",) for i in range(N)),
        changes=changes,
        plain=readings(labels, rise=0.2),
        plain_state=rng.random((DEPTHS, N)),
        span=span(),
        provenance=ORIGIN,
    )


def fake_alignment() -> Alignment:
    values = np.array([0.2, 0.5, 0.9])
    return Alignment(
        task="<i>trec", names=("θ", "Qθ", "<W>θ"), values=values, span=span(), provenance=ORIGIN
    )


FIGURES = {
    "curves": lambda: lens_curves(fake_lens()),
    "tokens": lambda: lens_tokens(fake_lens()),
    "panels": lambda: diagnostics_panels(fake_diagnostics()),
    "alignment": lambda: alignment_by_layer(fake_diagnostics()),
    "bars": lambda: alignment_bars(fake_alignment()),
}


def named(figure, axis=None):
    """The curves that the legend can name, those of one panel if its axis is given."""
    return {
        trace.name: trace
        for trace in figure.data
        if trace.name and (axis is None or (trace.xaxis or "x") == axis)
    }


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_returned_not_shown_and_say_what_they_show(name, capfd, monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a figure was shown")

    monkeypatch.setattr(plotly.io, "show", refuse)
    monkeypatch.setattr(webbrowser, "open", refuse)
    figure = FIGURES[name]()
    assert isinstance(figure, go.Figure)
    assert capfd.readouterr() == ("", "")
    subtitle = figure.layout.title.subtitle.text
    assert "&lt;i&gt;trec · smollm2-135m" in subtitle
    assert name == "bars" or f"n = {N} test queries" in subtitle
    assert "<i>" not in figure.to_json()
    assert "<W>" not in figure.to_json()


@pytest.mark.parametrize("labels", [True, False])
def test_curves_are_the_tables_and_part_at_the_marked_depth(labels) -> None:
    lens = fake_lens(labels)
    figure, table = lens_curves(lens), lens.table()
    scores = [LABELS if labels else "accuracy, full vocabulary", "logit difference", "log10 rank"]
    for axis, score in zip(("x", "x2", "x3"), scores, strict=True):
        curves = named(figure, axis)
        for label, run in (("Zero-shot", "plain"), ("Learned vector", "injected")):
            rows = table[(table["score"] == score) & (table["run"] == run)]
            np.testing.assert_allclose(curves[label].y, rows["value"])
            assert list(curves[label].x) == list(range(DEPTHS))
            assert f"n = {N}" in curves[label].hovertext[0]
    assert {shape.x0 for shape in figure.layout.shapes} == {3}
    shown = [trace.name for trace in figure.data if trace.name and trace.showlegend]
    assert sorted(shown) == ["Learned vector", "Zero-shot"]


def test_bands_are_the_intervals() -> None:
    lens = fake_lens()
    rows = lens.table().query("score == 'logit difference' and run == 'injected'")
    bands = [t for t in lens_curves(lens).data if t.fill and t.xaxis == "x2"]
    band = next(t for t in bands if t.legendgroup == "learned")
    np.testing.assert_allclose(band.y, [*rows["high"], *rows["low"][::-1]])


def test_a_plain_lens_has_one_curve_and_no_marked_depth() -> None:
    lens = fake_lens()
    tokens = lens.tokens[lens.tokens["state"] == "plain"]
    alone = replace(lens, setting="zero-shot", layer=None, injected=None, tokens=tokens)
    assert set(named(lens_curves(alone))) == {"Zero-shot"}
    assert len(lens_tokens(alone).data) == 1
    for figure in (lens_curves(alone), lens_tokens(alone)):
        assert not figure.layout.shapes
        assert "vector" not in figure.layout.title.subtitle.text


def test_tokens_are_shown_literally_with_blanks_as_signs() -> None:
    figure = lens_tokens(fake_lens())
    left, right = figure.data
    assert np.shape(left.z) == np.shape(right.z) == (DEPTHS, len(TOKENS))
    wanted = ["·jumped", "↵", "&lt;b&gt;&amp;", "⍽·", "a·token…"]
    assert list(right.text[0]) == wanted
    assert list(right.customdata[0]) == [*wanted[:-1], "a·token·that·…"], "at the pointer"
    assert "θ itself: ·jumped" in figure.layout.title.subtitle.text
    assert figure.layout.yaxis.autorange == "reversed"
    np.testing.assert_allclose(right.z[2], [11 - rank for rank in range(1, 6)])


@pytest.mark.parametrize("labels", [True, False])
def test_panels_hold_the_plain_run_and_each_layer_from_its_own_depth_on(labels) -> None:
    result = fake_diagnostics(labels=labels)
    figure, table = diagnostics_panels(result), result.table()
    scores = [LABELS if labels else "accuracy, full vocabulary", "logit difference", CHANGE, SIZE]
    for axis, score in zip(("x", "x2", "x3", "x4"), scores, strict=True):
        curves = named(figure, axis)
        assert ("Zero-shot" in curves) == (score not in (CHANGE, SIZE))
        for layer in (2, 5):
            rows = table.query("score == @score and layer == @layer and depth >= @layer")
            curve = curves[f"Vector at layer {layer}"]
            np.testing.assert_allclose(curve.y, rows["value"])
            assert list(curve.x) == list(range(layer, DEPTHS))
    lines = {(t.line.color, t.marker.symbol) for t in named(figure, "x").values()}
    assert len(lines) == 3


def test_random_vectors_stand_behind_every_alignment() -> None:
    _, low, high = span().of_random
    for figure, axes in (
        (alignment_by_layer(fake_diagnostics()), {"y domain", "y", "y2"}),
        (diagnostics_panels(fake_diagnostics()), {"y3"}),
        (alignment_bars(fake_alignment()), {"y"}),
    ):
        bands = [s for s in figure.layout.shapes if s.type == "rect"]
        assert {band.yref for band in bands} <= axes
        assert bands
        for band in bands:
            np.testing.assert_allclose([band.y0, band.y1], [low, high])
    assert re.search(r"6 of 64 dimensions", figure.layout.title.subtitle.text)
    titles = [a.text for a in alignment_by_layer(fake_diagnostics()).layout.annotations]
    assert titles == ["Task alignment of the state", "Task alignment of the change"]


def test_without_alignment_its_panel_is_left_out_and_its_figure_refused() -> None:
    everything = replace(fake_diagnostics(), span=span(WIDTH))
    titles = [a.text for a in diagnostics_panels(everything).layout.annotations]
    assert len(titles) == 3
    assert not any("alignment" in title for title in titles)
    assert STATE not in set(everything.table()["score"])
    with pytest.raises(InvalidInput, match="span the whole space, so there is no alignment"):
        alignment_by_layer(everything)


def test_bars_are_the_values_in_their_order() -> None:
    (bars,) = alignment_bars(fake_alignment()).data
    assert list(bars.x) == ["θ", "Qθ", "&lt;W&gt;θ"]
    assert list(bars.y) == [0.2, 0.5, 0.9]
    assert "random: " in bars.hovertext[0]


def test_one_query_and_one_layer_are_enough() -> None:
    result = fake_diagnostics(layers=(0,))
    (change,) = result.changes
    few = Readings(
        **{
            name: getattr(result.plain, name)[:, :1]
            for name in ("correct", "log_probability", "logit_difference", "rank")
        },
        correct_label=None,
    )
    one = replace(
        result,
        queries=result.queries[:1],
        plain=few,
        plain_state=result.plain_state[:, :1],
        changes=(
            replace(
                change,
                readings=few,
                state=change.state[:, :1],
                change=change.change[:, :1],
                size=change.size[:, :1],
            ),
        ),
    )
    figure = diagnostics_panels(one)
    assert figure.to_json()
    assert "[" not in named(figure, "x4")["Vector at layer 0"].hovertext[0].split("<br>")[1]
