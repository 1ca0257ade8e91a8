"""Figures of `compare_methods` and `flexibility`, from rows made by hand: no model is needed."""

import re
import webbrowser
from functools import cache

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import plotly.io
import pytest

from mechtv import plots
from mechtv.errors import InvalidInput
from mechtv.plots.style import LOOKS
from mechtv.study import MethodComparison
from mechtv.study.correlation import dntp_accuracy_correlation

FULL = "accuracy, full vocabulary"
FEW = ("learned", "i2cl")
TASKS = ("present-past", "antonyms", "sst2")
LAYERS = (3, 11, 18, 26)
PEAK = {  # how good a method can be, and where in the model (0 to 1) it is best
    "learned": (0.9, 0.8),
    "learned-dntp": (0.95, 0.7),
    "hidden_state": (0.5, 0.6),
    "function_vector": (0.45, 0.35),
    "state_vector": (0.6, 0.5),
    "i2cl": (0.55, None),
    "linear": (0.8, 1.0),
    "constant": (0.4, 0.9),
    "mlp": (0.7, 1.0),
}
ORIGIN = {"model": "smollm2-135m", "revision": "1", "weights": "raw", "template": "t", "seed": 0}


def fake_comparison(
    tasks=TASKS,
    methods=tuple(PEAK),
    layers=LAYERS,
    *,
    labelled=("sst2",),
    n=100,
    change=lambda rows: rows,
) -> MethodComparison:
    """Rows as `compare_methods` gives them; the nearer to in-context, the more accurate."""
    rng = np.random.default_rng(0)
    rows = []
    for t, task in enumerate(tasks):
        best = 0.95 - 0.07 * t
        for method in ("zero-shot", "in-context", *methods):
            has_layer = method in PEAK and PEAK[method][1] is not None
            for layer in layers if has_layer else (None,):
                if method in PEAK:
                    top, where = PEAK[method]
                    depth = 0 if layer is None else layer / max(layers[-1], 1) - where
                    quality = top * np.exp(-4 * depth**2) * (0.85 + 0.3 * rng.random())
                else:
                    quality = float(method == "in-context")
                cell = {"task": task, "method": method, "layer": layer}
                rows += _cell(cell, best * min(quality, 1), task in labelled, n, rng)
    return MethodComparison(rows=change(pd.DataFrame(rows).astype({"layer": "Int64"})))


def _cell(cell, quality, labelled, n, rng):
    rows = []
    for split in ("test", "validation"):
        if split == "validation" and cell["layer"] is None:
            continue
        hits = rng.random(n) < quality
        spread = 0.5 + np.linspace(0, 1, n)
        scores = {
            "accuracy, full vocabulary": _share(hits),
            "exact match": _share(hits & (np.arange(n) % 9 > 0)),
            "log-probability": _mean(-(0.3 + 6 * (1 - quality)) * spread),
        }
        if labelled:
            scores["accuracy, label-restricted"] = _share(hits | (rng.random(n) < 0.4))
        if split == "test":
            distance = 0.0 if cell["method"] == "in-context" else 6 * np.exp(-4 * quality)
            scores["dNTP over labels"] = _mean(distance / 4 * spread)
            scores["dNTP over vocabulary"] = _mean(distance * spread)
        for score, (value, low, high) in scores.items():
            shots = 8 if cell["method"] == "in-context" or score.startswith("dNTP") else 0
            about = {"parameters": 576, "seconds_to_fit": 1.0, "seconds_per_query": 0.01}
            own = {"split": split, "score": score, "shots": shots, "n": n}
            rows.append({**cell, **own, "value": value, "low": low, "high": high} | about | ORIGIN)
    return rows


def _share(hits):
    """The Wilson interval in one line: scipy's takes seconds for this many rows."""
    p, z2 = hits.mean(), 1.96**2 / len(hits)
    half = np.sqrt(z2 * (p * (1 - p) + z2 / 4))
    return float(p), float((p + z2 / 2 - half) / (1 + z2)), float((p + z2 / 2 + half) / (1 + z2))


def _mean(values):
    half = 1.96 * values.std() / np.sqrt(len(values))
    return float(values.mean()), float(values.mean() - half), float(values.mean() + half)


def flexibility_table(places=("last token", "position -4", "every 4th layer")) -> pd.DataFrame:
    """Rows as `flexibility` gives them."""
    table = fake_comparison(("antonyms",)).table().query("split == 'test'")
    table = table[~table["score"].str.startswith("dNTP")]
    plain = table[table["method"].isin(["zero-shot", "in-context"])].assign(place="no vector")
    parts = [
        table[(table["layer"] == layer) & table["method"].isin(["learned", "function_vector"])]
        for layer in LAYERS[: len(places)]
    ]
    placed = [part.assign(place=place) for part, place in zip(parts, places, strict=True)]
    columns = ["place", "method", "parameters", "task", "shots", "score", "value", "low", "high"]
    return pd.concat([plain, *placed], ignore_index=True)[[*columns, "n"]]


@pytest.fixture(scope="module")
def comparison() -> MethodComparison:
    return fake_comparison()


@cache
def drawn_once(draw) -> go.Figure:
    return draw(fake_comparison())


FIGURES = (
    plots.accuracy_of_methods,
    plots.methods_table_bars,
    plots.dntp_against_accuracy,
    lambda comparison: plots.accuracy_of_methods(comparison, "dNTP over vocabulary"),
    lambda comparison: plots.methods_table_bars(comparison, "dNTP over labels"),
    lambda comparison: plots.methods_table_bars(comparison, "log-probability"),
    lambda _: plots.flexibility_bars(flexibility_table()),
)


def traces(figure, group):
    return [t for t in figure.data if t.legendgroup == group and t.hoverinfo != "skip"]


def rows_of(comparison, score=FULL, split="test", **cell):
    table = comparison.table()
    table = table[(table["score"] == score) & (table["split"] == split)]
    for name, value in cell.items():
        table = table[table[name] == value]
    return table


def numbers(text):
    return text.replace("−", "-")


@pytest.mark.parametrize("draw", FIGURES)
def test_figures_are_returned_and_neither_shown_nor_printed(draw, comparison, capfd, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a figure was shown")

    monkeypatch.setattr(plotly.io, "show", refuse)
    monkeypatch.setattr(webbrowser, "open", refuse)
    assert isinstance(draw(comparison), go.Figure)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("draw", FIGURES)
def test_the_legend_names_each_method_once_and_rules_it_in_every_panel(draw):
    figure = drawn_once(draw)
    shown = [t for t in figure.data if t.showlegend is not False]
    assert len({t.name for t in shown}) == len(shown)
    assert {t.legendgroup for t in shown} == {t.legendgroup for t in figure.data}
    assert figure.layout.legend.groupclick in (None, "togglegroup")
    looks = list(LOOKS)
    assert all(t.legendrank == looks.index(t.legendgroup) for t in shown)


@pytest.mark.parametrize("draw", FIGURES)
def test_what_is_drawn_fits_between_title_and_legend(draw):
    layout = drawn_once(draw).layout
    lines = layout.title.subtitle.text.count("<br>") + 1
    assert layout.margin.t >= 14 + 24 + 17 * lines + 20
    panels = layout.height - layout.margin.t - layout.margin.b
    assert panels >= 200
    assert layout.margin.b >= 100


def test_each_task_has_its_panel_with_every_method_at_its_layers(comparison):
    figure = plots.accuracy_of_methods(comparison)
    names = {a.text: a.x for a in figure.layout.annotations}
    assert set(TASKS) < set(names)
    for method in ("learned", "mlp", "hidden_state"):
        drawn = traces(figure, method)
        assert len(drawn) == len(TASKS)
        for task, trace in zip(TASKS, drawn, strict=True):
            axis = figure.layout["xaxis" + trace.xaxis[1:]]
            assert axis.domain[0] < names[task] < axis.domain[1]
            rows = rows_of(comparison, task=task, method=method)
            assert tuple(trace.x) == LAYERS
            assert trace.y == pytest.approx(rows["value"].tolist())
            assert np.add(trace.y, trace.error_y.array) == pytest.approx(rows["high"].tolist())
            low = np.subtract(trace.y, trace.error_y.arrayminus)
            assert low == pytest.approx(rows["low"].tolist())
            for text, row in zip(trace.hovertext, rows.itertuples(), strict=True):
                expected = f"{row.value:.2f} [{row.low:.2f}, {row.high:.2f}]"
                assert f"{LOOKS[method].label}, layer {row.layer}</b>" in text
                assert expected in text
                assert f"n = {row.n}" in text


@pytest.mark.parametrize(
    ("method", "label"),
    [("zero-shot", "Zero-shot"), ("in-context", "In context (8 shots)"), ("i2cl", "I2CL")],
)
def test_what_has_no_layer_is_a_line_with_its_band_across_each_panel(comparison, method, label):
    figure = plots.accuracy_of_methods(comparison)
    bands = [t for t in figure.data if t.legendgroup == method and t.hoverinfo == "skip"]
    assert len(bands) == len(TASKS)
    for task, trace, band in zip(TASKS, traces(figure, method), bands, strict=True):
        (row,) = rows_of(comparison, task=task, method=method).itertuples()
        assert trace.name == label
        assert set(trace.y) == {row.value}
        assert (min(trace.x), max(trace.x)) == figure.layout.xaxis.range
        assert (min(band.y), max(band.y)) == (row.low, row.high)
        assert band.xaxis == trace.xaxis


@pytest.mark.parametrize(("n", "grid"), [(1, (1, 1)), (3, (1, 3)), (4, (2, 2)), (9, (3, 3))])
def test_panels_stand_in_an_even_grid_with_shared_axes(n, grid):
    figure = plots.accuracy_of_methods(fake_comparison([f"task {i}" for i in range(n)], FEW, n=5))
    axes = [figure.layout[name] for name in figure.layout if re.fullmatch(r"xaxis\d*", name)]
    ups = [figure.layout[name] for name in figure.layout if re.fullmatch(r"yaxis\d*", name)]
    assert len(axes) == n
    assert (len({y.domain for y in ups}), len({x.domain for x in axes})) == grid
    assert len({x.range for x in axes}) == len({y.range for y in ups}) == 1
    assert sum(x.matches is None for x in axes) == sum(y.matches is None for y in ups) == 1
    assert sum(x.showticklabels is not False for x in axes) == grid[1]


def test_the_lowest_panel_of_each_column_shows_its_ticks():
    layout = plots.accuracy_of_methods(
        fake_comparison([f"task {i}" for i in range(5)], FEW, n=5)
    ).layout
    showing = [layout["xaxis" + i].showticklabels is not False for i in ("", "2", "3", "4", "5")]
    assert showing == [False, False, True, True, True]


@pytest.mark.parametrize(
    ("score", "title", "log"),
    [
        ("accuracy, full vocabulary", "Accuracy (full vocabulary)", False),
        ("exact match", "Exact match", False),
        ("log-probability", "Log-probability (nats per token)", False),
        ("dNTP over labels", "dNTP over labels (nats)", True),
        ("dNTP over vocabulary", "dNTP over vocabulary (nats)", True),
    ],
)
@pytest.mark.parametrize("draw", [plots.accuracy_of_methods, plots.methods_table_bars])
def test_titles_units_and_ranges_follow_the_score(draw, score, title, log, comparison):
    figure = draw(comparison, score)
    assert title in [a.text for a in figure.layout.annotations]
    assert figure.layout.title.text.startswith(f"<b>{title.split(' (nats')[0]} ")
    axis = figure.layout.yaxis
    assert axis.type == ("log" if log else None)
    low, high = 10.0 ** np.array(axis.range) if log else axis.range
    values = np.array([y for t in figure.data if t.hoverinfo != "skip" for y in t.y], float)
    assert low < values.min()
    assert values.max() <= high
    assert ("nats" in traces(figure, "learned")[0].hovertext[0]) == ("nats" in title)
    drawn = {t.legendgroup for t in figure.data}
    assert ("in-context" in drawn) != log
    assert ("in context is 0" in figure.layout.title.subtitle.text) == log


def test_tasks_without_the_score_are_left_out_and_named(comparison):
    for draw in (plots.accuracy_of_methods, plots.methods_table_bars):
        figure = draw(comparison, "accuracy, label-restricted")
        text = figure.layout.title.subtitle.text
        assert "Without this score, left out: present-past, antonyms" in text
        assert text.startswith("sst2 · smollm2-135m · n = 100 test queries")
        assert len(traces(figure, "learned")) == 1


def test_many_left_out_tasks_are_named_on_lines_that_fit(comparison):
    tasks = [f"a rather long name of task {i}" for i in range(9)] + ["sst2"]
    figure = plots.accuracy_of_methods(
        fake_comparison(tasks, FEW, n=5), "accuracy, label-restricted"
    )
    lines = figure.layout.title.subtitle.text.split("<br>")
    assert max(map(len, lines)) <= 110
    assert all(task in figure.layout.title.subtitle.text.replace("<br>", " ") for task in tasks)


def test_bars_are_the_test_scores_of_the_layer_that_is_best_on_validation():
    def change(rows):
        """Layer 3 of the learned vector is by far the worst on test and the best in validation."""
        mine = (rows["method"] == "learned") & (rows["layer"] == 3) & (rows["score"] == FULL)
        rows.loc[mine & (rows["split"] == "test"), ["value", "low"]] = 0.01
        rows.loc[mine & (rows["split"] == "validation"), "value"] = 1.0
        return rows

    figure = plots.methods_table_bars(fake_comparison(methods=FEW, change=change))
    (bar,) = traces(figure, "learned")
    ticks = dict(zip(figure.layout.xaxis.ticktext, figure.layout.xaxis.tickvals, strict=True))
    assert [ticks[task] for task in TASKS] == list(bar.x)
    assert bar.y[:2] == pytest.approx([0.01, 0.01])
    assert "Learned vector, layer 3</b><br>0.01 [0.01," in bar.hovertext[0]
    assert figure.layout.barmode == "group"
    (other,) = traces(figure, "i2cl")
    assert other.hovertext[0].startswith("<b>I2CL</b>")


def test_in_context_and_zero_shot_lie_across_the_bars_of_their_task(comparison):
    figure = plots.methods_table_bars(comparison)
    for method in ("zero-shot", "in-context"):
        for at, (task, line) in enumerate(zip(TASKS, traces(figure, method), strict=True)):
            (row,) = rows_of(comparison, task=task, method=method).itertuples()
            assert set(line.y) == {row.value}
            assert at - 0.5 < min(line.x) < at < max(line.x) < at + 0.5


def test_many_tasks_stand_in_rows_that_are_equally_wide():
    tasks = [f"task {i}" for i in range(9)]
    figure = plots.methods_table_bars(fake_comparison(tasks, FEW, n=5))
    layout = figure.layout
    assert layout.xaxis.ticktext + layout.xaxis2.ticktext == tuple(tasks)
    assert layout.xaxis.range == layout.xaxis2.range == (-0.5, 4.5)
    upper, lower = traces(figure, "learned")
    assert (list(upper.x), list(lower.x)) == ([0, 1, 2, 3, 4], [0, 1, 2, 3])


@pytest.mark.parametrize("over", ["labels", "vocabulary"])
def test_every_cell_is_a_point_of_dntp_and_accuracy(comparison, over):
    figure = plots.dntp_against_accuracy(comparison, over, FULL)
    (cloud,) = traces(figure, "linear")
    assert list(cloud.y) == rows_of(comparison, method="linear")["value"].tolist()
    dntp = rows_of(comparison, f"dNTP over {over}", method="linear")
    assert list(cloud.x) == dntp["value"].tolist()
    assert len(cloud.x) == len(TASKS) * len(LAYERS)
    first = dntp.iloc[0]
    for part in ("Linear map, layer 3", "present-past", f"dNTP {first['value']:.3f} [", "n = 100"):
        assert part in cloud.hovertext[0]
    groups = {t.legendgroup for t in figure.data}
    assert groups == {"zero-shot", *PEAK}
    assert figure.layout.xaxis.type == "log"
    assert figure.layout.xaxis.title.text == f"dNTP over {over} (nats)"
    assert 10 ** figure.layout.xaxis.range[0] < min(min(t.x) for t in figure.data)


def test_the_subtitle_has_the_correlations_of_the_table(comparison):
    text = numbers(plots.dntp_against_accuracy(comparison).layout.title.subtitle.text)
    found = dntp_accuracy_correlation(comparison).head(2)
    for name, row in zip(("Spearman", "Pearson with log dNTP"), found.itertuples(), strict=True):
        assert f"{name} {row.value:.2f} [{row.low:.2f}, {row.high:.2f}]" in text
    assert f"over {row.n} vectors" in text
    assert "label-restricted where a task has labels" in text


def test_flexibility_bars_stand_at_their_places_and_lines_at_all():
    table = flexibility_table()
    figure = plots.flexibility_bars(table)
    assert figure.layout.xaxis.ticktext == ("last token", "position -4", "every 4th<br>layer")
    assert figure.layout.title.subtitle.text.startswith("antonyms · n = 100 test queries")
    (bar,) = traces(figure, "learned")
    mine = table[(table["method"] == "learned") & (table["score"] == FULL)]
    assert list(bar.x) == [0, 1, 2]
    assert list(bar.y) == mine["value"].tolist()
    assert bar.hovertext[0].startswith("<b>Learned vector</b><br>")
    lines = traces(figure, "in-context")
    assert [line.x[1] for line in lines] == [0, 1, 2]
    assert {y for line in lines for y in line.y} == {lines[0].y[0]}


def test_an_interval_that_reaches_0_is_drawn_on_a_logarithmic_axis():
    def change(rows):
        rows.loc[rows["score"] == "dNTP over labels", "low"] = 0.0
        return rows

    comparison = fake_comparison(methods=FEW, change=change)
    for draw in (plots.accuracy_of_methods, plots.methods_table_bars):
        figure = draw(comparison, "dNTP over labels")
        (trace, *_) = traces(figure, "learned")
        assert (np.subtract(trace.y, trace.error_y.arrayminus) > 0).all()
        assert "[0.000, " in trace.hovertext[0]
        least = min(y for t in figure.data if t.hoverinfo != "skip" for y in t.y)
        assert -3 < figure.layout.yaxis.range[0] < np.log10(least / 3)


def test_one_task_one_method_one_layer_and_one_query_are_enough():
    small = fake_comparison(("a",), ("learned",), (0,), n=1)
    for score in (FULL, "log-probability", "dNTP over vocabulary"):
        assert plots.accuracy_of_methods(small, score).to_json()
        assert plots.methods_table_bars(small, score).to_json()


def test_a_method_without_a_look_is_drawn_too():
    def change(rows):
        return rows.replace({"method": {"mlp": "my_method"}})

    figure = plots.accuracy_of_methods(fake_comparison(change=change))
    assert {t.name for t in traces(figure, "my_method")} == {"My method"}


def test_text_of_users_cannot_become_markup():
    comparison = fake_comparison(("<b>bold", "b&c"), FEW, labelled=("b&c",))
    for figure in (
        plots.accuracy_of_methods(comparison),
        plots.accuracy_of_methods(comparison, "accuracy, label-restricted"),
        plots.methods_table_bars(comparison),
        plots.dntp_against_accuracy(comparison),
    ):
        assert "<b>bold" not in str(figure.to_plotly_json())
        assert "&lt;b&gt;bold" in str(figure.to_plotly_json())


def test_what_cannot_be_drawn_is_one_sentence(comparison):
    for draw in (plots.accuracy_of_methods, plots.methods_table_bars):
        with pytest.raises(InvalidInput, match="No task has the score 'BLEU'; there are 'accuracy"):
            draw(comparison, "BLEU")
    with pytest.raises(InvalidInput, match="No method here has a layer; methods_table_bars"):
        plots.accuracy_of_methods(fake_comparison(methods=("i2cl",)))
    with pytest.raises(InvalidInput, match="needs 3 vectors or more"):
        plots.dntp_against_accuracy(fake_comparison(("a",), ("learned",), (0, 1)))
    table = flexibility_table()
    with pytest.raises(InvalidInput, match="tasks antonyms, b; draw one at a time"):
        plots.flexibility_bars(pd.concat([table, table.assign(task="b")]))
    with pytest.raises(InvalidInput, match=r"more than one .*learned, last token\); keep the rows"):
        plots.flexibility_bars(pd.concat([table, table[table["place"] == "last token"]]))
    with pytest.raises(InvalidInput, match="more than one"):
        plots.accuracy_of_methods(fake_comparison(change=lambda rows: pd.concat([rows, rows]), n=5))


def test_the_looks_of_all_methods_differ_in_colour_symbol_and_dash():
    for feature in ("label", "color", "symbol", "dash"):
        values = [getattr(look, feature) for look in LOOKS.values()]
        assert len(set(values)) == len(values), feature
    assert {"learned-dntp", "constant", "mlp"} < set(LOOKS)
