"""Figures for a dark page: everything that is drawn stands out from it."""

import json
from collections.abc import Iterator
from itertools import combinations

import numpy as np
import plotly.graph_objects as go
import pytest
from plots.gallery import BUILDERS, drawn

from mechtv.plots import dark
from mechtv.plots.style import LOOKS, channels, titled
from mechtv.plots.themes import DARK_GRID, DARK_INK, DARK_MUTED, PAPER, contrast

QUIET = {PAPER, DARK_GRID}  # gaps, grids and dots that say "not this one"


def colors(value: object) -> Iterator[str]:
    """One colour or many, as Plotly keeps them."""
    yield from [value] if isinstance(value, str) else [] if value is None else map(str, value)


def marks(trace: go.Scatter | go.Bar | go.Heatmap) -> Iterator[str]:
    """Lines, markers, bars, their error bars and the ends of scales, but no areas."""
    if trace.type == "heatmap":
        yield from (color for _, color in trace.colorscale)
        yield from colors(trace.textfont.color)
        return
    yield from colors(trace.marker.color)
    yield from colors(trace.error_y.color)
    if trace.type == "scatter" and trace.line.width != 0:
        yield from colors(trace.line.color)


@pytest.mark.parametrize("name", BUILDERS)
def test_every_mark_and_every_letter_stands_out_from_the_dark_page(name) -> None:
    figure = dark(drawn(name))
    layout, template = figure.layout, figure.layout.template
    assert template.layout.paper_bgcolor == PAPER
    found = [color for trace in figure.data for color in marks(trace)]
    found += [shape.line.color for shape in layout.shapes if shape.line.width != 0]
    found += [note.font.color for note in layout.annotations]
    found += [template.layout.font.color, template.layout.title.subtitle.font.color]
    found += [template.layout.shapedefaults.line.color, template.data.bar[0].error_y.color]
    seen = {color for color in found if color is not None} - QUIET
    assert seen
    assert {color: contrast(color, PAPER) for color in seen if contrast(color, PAPER) < 3} == {}


@pytest.mark.parametrize("name", BUILDERS)
def test_data_words_and_sizes_stay_and_the_light_figure_too(name) -> None:
    figure = drawn(name)
    before = json.loads(figure.to_json())
    made = dark(figure)
    assert json.loads(figure.to_json()) == before
    assert made.layout.title == figure.layout.title
    assert (made.layout.height, made.layout.margin) == (figure.layout.height, figure.layout.margin)
    for one, other in zip(made.data, figure.data, strict=True):
        assert one.name == other.name
        for field in ("x", "y", "z"):
            if field in other and other[field] is not None:
                np.testing.assert_array_equal(
                    np.asarray(one[field], object), np.asarray(other[field], object)
                )


def test_settings_keep_their_hue_and_stay_apart() -> None:
    figure = titled("t", height=100)
    for look in LOOKS.values():
        figure.add_scatter(y=[1], line={"color": look.color})
    made = [trace.line.color for trace in dark(figure).data]
    kept = {
        look.label for look, color in zip(LOOKS.values(), made, strict=True) if look.color == color
    }
    lightened = {look.label for look in LOOKS.values()} - kept
    assert lightened == {"Learned vector (dNTP)", "Zero-shot", "Residual MLP"}
    assert made[list(LOOKS).index("zero-shot")] == DARK_INK
    for one, other in combinations(made, 2):
        assert np.abs(np.subtract(channels(one), channels(other))).max() > 40, (one, other)


@pytest.mark.parametrize("name", ["head_effects", "head_maps", "key_heads", "lens_tokens"])
def test_zero_on_a_heat_map_has_the_colour_of_the_page(name) -> None:
    heat = next(trace for trace in dark(drawn(name)).data if trace.type == "heatmap")
    scale = [color for _, color in heat.colorscale]
    assert scale[len(scale) // 2 if len(scale) == 3 else 0] == PAPER
    assert min(contrast(color, DARK_INK) for color in scale) > 3, "letters on any cell"


def test_what_is_transparent_stays_so() -> None:
    figure = titled("t", height=100)
    figure.add_scatter(y=[1], fillcolor="rgba(51,34,136,0.13)", line={"color": "rgb(0, 0, 0)"})
    (trace,) = dark(figure).data
    assert trace.fillcolor.endswith(", 0.13)")
    assert channels(trace.fillcolor) > channels("rgba(51,34,136,0.13)")
    assert trace.line.color == DARK_INK


def test_contrast_is_that_of_the_guidelines() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)
    assert contrast(DARK_MUTED, PAPER) > 4.5, "small letters"
