"""Figures at the size of a paper's column or text."""

import json
from collections.abc import Iterator

import pytest
from plots.gallery import BUILDERS, drawn

from mechtv.errors import InvalidInput
from mechtv.plots import dark, for_print
from mechtv.plots.room import legend_names, legend_rows

COLUMN, TEXT = 84, 174  # millimetres
POINT = 96 / 72


def letters(options: object, name: str = "") -> Iterator[float]:
    """The size of every font, wherever it stands."""
    if isinstance(options, dict):
        for key, value in options.items():
            if key == "size" and "font" in name:
                yield value
            yield from letters(value, key)
    elif isinstance(options, list | tuple):
        for value in options:
            yield from letters(value, name)


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("width", [COLUMN, TEXT])
def test_type_is_7_or_8_points_high_at_the_width_of_the_paper(name, width) -> None:
    figure = drawn(name)
    before = json.loads(figure.to_json())
    made = for_print(figure, width_mm=width)
    assert made.layout.width == round(width * 96 / 25.4)
    points = {round(size / POINT, 3) for size in letters(made.to_plotly_json())}
    assert points == {7, 8}
    assert json.loads(figure.to_json()) == before


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("width", [COLUMN, TEXT])
def test_titles_fit_the_width_and_the_legend_its_room(name, width) -> None:
    figure, made = drawn(name), for_print(drawn(name), width_mm=width)
    layout = made.layout
    for text, size in ((layout.title.text, 8), (layout.title.subtitle.text, 7)):
        widest = max(len(line.replace("<b>", "")) for line in text.split("<br>"))
        assert widest * 0.54 * size * POINT < layout.width
    words = figure.layout.title.subtitle.text.replace("<br>", " ").replace("· ", "")
    assert layout.title.subtitle.text.replace("<br>", " ").replace("· ", "") == words
    margin = layout.margin
    left = layout.template.layout.margin.l if margin.l is None else margin.l
    right = layout.template.layout.margin.r if margin.r is None else margin.r
    rows = legend_rows(legend_names(made), layout.width - left - right, size=8 * POINT / 14)
    assert margin.b >= 40 + 19 * rows
    assert layout.height - margin.t - margin.b > 130


def test_lines_and_markers_are_thinner_than_on_the_screen() -> None:
    name = "accuracy_of_methods"
    for made, on_screen in zip(
        for_print(drawn(name), width_mm=TEXT).data, drawn(name).data, strict=True
    ):
        if on_screen.line.width:
            assert made.line.width == pytest.approx(on_screen.line.width * 8 * POINT / 14)
            assert made.marker.size is None or made.marker.size < on_screen.marker.size
        assert made.y == on_screen.y


def test_a_given_height_is_the_height_and_too_low_a_one_is_refused() -> None:
    figure = drawn("dntp_bars")
    assert for_print(figure, width_mm=COLUMN, height_mm=80).layout.height == round(80 * 96 / 25.4)
    with pytest.raises(
        InvalidInput, match=r"height of 20 mm leaves no room.*give (\d+)"
    ) as refused:
        for_print(figure, width_mm=COLUMN, height_mm=20)
    least = int(str(refused.value).split("give ")[1].split()[0])
    assert for_print(figure, width_mm=COLUMN, height_mm=least)
    with pytest.raises(InvalidInput, match="20 mm wide has no room; give 60 or more"):
        for_print(figure, width_mm=20)


@pytest.mark.parametrize("name", ["dntp_bars", "lens_curves"])
def test_the_title_can_be_left_to_the_caption(name) -> None:
    whole = for_print(drawn(name), width_mm=COLUMN)
    bare = for_print(drawn(name), width_mm=COLUMN, title=False)
    assert not bare.layout.title.text
    assert not bare.layout.title.subtitle.text
    assert bare.layout.height < whole.layout.height
    panels = [f.layout.height - f.layout.margin.t - f.layout.margin.b for f in (whole, bare)]
    assert panels[0] == pytest.approx(panels[1], abs=1)
    assert bare.layout.margin.t >= 10 + 13 * (name == "lens_curves")


def test_a_dark_figure_can_be_printed_too() -> None:
    made = for_print(dark(drawn("dntp_bars")), width_mm=COLUMN)
    assert made.layout.template.layout.paper_bgcolor == "#1a2027"
