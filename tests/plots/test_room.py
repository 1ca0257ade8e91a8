"""Titles and legends have the room that they need in a figure of 600 pixels."""

import plotly.graph_objects as go
import pytest
from plots.gallery import BUILDERS, drawn

from mechtv.plots.room import BELOW, ROW_HEIGHT, finished, legend_names, legend_rows
from mechtv.plots.style import titled


@pytest.mark.parametrize("name", BUILDERS)
def test_title_and_subtitle_end_within_600_pixels(name) -> None:
    title = drawn(name).layout.title
    assert len(title.text.removeprefix("<b>").removesuffix("</b>")) <= 62
    assert max(map(len, title.subtitle.text.split("<br>"))) <= 80


@pytest.mark.parametrize("name", BUILDERS)
def test_below_the_panels_is_room_for_the_legend_at_600_pixels(name) -> None:
    figure = drawn(name)
    layout = figure.layout
    left = layout.template.layout.margin.l if layout.margin.l is None else layout.margin.l
    right = layout.template.layout.margin.r if layout.margin.r is None else layout.margin.r
    rows = legend_rows(legend_names(figure), 600 - left - right)
    assert layout.margin.b >= BELOW + ROW_HEIGHT * rows
    assert layout.height - layout.margin.t - layout.margin.b >= 180


def test_a_legend_has_as_many_rows_as_its_names_are_long() -> None:
    assert legend_rows([], 500) == 0
    assert legend_rows(["short"], 500) == 1
    assert legend_rows(["short"] * 5, 500) == 1
    assert legend_rows(["short"] * 6, 500) == 2
    assert legend_rows(["a name of thirty-two characters.."] * 3, 500) == 3
    assert legend_rows(["short"] * 6, 500, size=0.5) == 1


def test_a_name_is_in_the_legend_once_in_its_order_and_counted_once() -> None:
    def figure(*traces: go.Scatter) -> go.Figure:
        return finished(titled("t", "s", height=200).add_traces(traces))

    first = go.Scatter(name="first", legendrank=0)
    second = go.Scatter(name="second")
    made = figure(second, first, second, go.Scatter(name="hidden", showlegend=False))
    assert legend_names(made) == ["first", "second"]
    assert [trace.showlegend for trace in made.data] == [True, True, False, False]
    assert made.layout.margin.b == figure(first, second).layout.margin.b
    bare = figure(go.Scatter())
    assert bare.layout.margin.b == BELOW
    assert bare.layout.height == bare.layout.margin.t + 200 + bare.layout.margin.b
