"""A figure at the size of a paper's column: small type, thin lines, and lines broken to fit."""

import math
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go

from mechtv.errors import InvalidInput
from mechtv.plots.room import (
    ABOVE,
    BELOW,
    LINE_HEIGHT,
    NARROW,
    ROW_HEIGHT,
    legend_names,
    legend_rows,
    sides,
)
from mechtv.plots.style import wrapped

MM, POINT = 96 / 25.4, 96 / 72  # pixels
ON_SCREEN = 14  # pixels of most letters on the screen
LARGE, SMALL = 8 * POINT, 7 * POINT  # of letters as large as that, and of smaller ones
SIZE = LARGE / ON_SCREEN
LETTER = 0.54  # of its height: the width of a letter on average
BOLD = 1.12  # times as wide as other letters
EDGE, LINE, ENTRY = 10, SIZE * LINE_HEIGHT, 19.5  # pixels; a legend's entries are never lower
LEAST_WIDTH, LEAST_PANELS = 60, 60  # millimetres; pixels
SIZED = {"marker", "line", "error_x", "error_y", "pattern", "colorbar"}
SIZES = {"size", "width", "thickness"}
SHIFTS = {"xshift", "yshift", "standoff"}


def for_print(
    figure: go.Figure,
    *,
    width_mm: int | float,
    height_mm: int | float | None = None,
    title: bool = True,
) -> go.Figure:
    """A copy of any figure of `mechtv.plots` for a paper, to be saved as it is.

    Letters are 7 and 8 points high. Title, subtitle, axis titles and legend are broken to fit the
    width. Panels side by side have room at the width of a page's text, such as 174 mm; a column has
    some 84 mm.

    Args:
        height_mm: in proportion to the figure on the screen if None.
        title: without it, title and subtitle are left to the caption.

    Raises:
        InvalidInput: for a width below 60 mm, or a height that leaves no room for the panels.
    """
    if width_mm < LEAST_WIDTH:
        raise InvalidInput(
            f"A figure {width_mm:g} mm wide has no room; give {LEAST_WIDTH} or more."
        )
    layout = figure.layout
    rows = legend_rows(legend_names(figure), NARROW - sides(figure))
    ticks = layout.margin.b - BELOW - ROW_HEIGHT * rows
    panels = SIZE * (layout.height - layout.margin.t - layout.margin.b)
    copy = go.Figure(figure)
    for part in (*copy.data, copy.layout):
        part.update(_smaller(part.to_plotly_json()), overwrite=True)
    _thin(copy)
    width = float(round(width_mm * MM))
    inner = width - sides(copy)
    below_axes, between = _break_lines(copy, inner, panels)
    panels += LINE * between
    above = _head(copy, width, title)
    rows = legend_rows(legend_names(copy), inner, size=SIZE)
    below = SIZE * (BELOW + ticks) + ENTRY * rows + LINE * below_axes
    height = above + panels + below if height_mm is None else height_mm * MM
    if height - above - below < LEAST_PANELS:
        least = math.ceil((above + below + LEAST_PANELS) / MM)
        raise InvalidInput(
            f"A height of {height_mm:g} mm leaves no room for the panels; give {least} or more."
        )
    margin = {"t": above, "b": below}
    return copy.update_layout(width=width, height=round(height), margin=margin, autosize=False)


def _smaller(value: Any, name: str = "", parent: str = "") -> Any:
    """Options as they are, but letters, lines and markers of a size for paper."""
    if isinstance(value, dict):
        return {key: _smaller(inner, key, name) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_smaller(inner, name, parent) for inner in value]
    if name == "dash" and isinstance(value, str):
        return re.sub(r"[\d.]+(?=px)", lambda found: f"{SIZE * float(found[0]):.1f}", value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if name == "size" and "font" in parent:
        return LARGE if value >= ON_SCREEN else SMALL
    sized = (name in SIZES and parent in SIZED) or name in SHIFTS or parent in {"margin", "pad"}
    return SIZE * value if sized else value


def _thin(figure: go.Figure) -> None:
    """What Plotly would draw as thick as on a screen where nothing is said."""
    template = figure.layout.template
    template.data.scatter = [
        {"line": {"width": 2 * SIZE}, "marker": {"size": 6 * SIZE}, "error_y": {"width": 3 * SIZE}}
    ]
    for axis in (template.layout.xaxis, template.layout.yaxis):
        axis.update(gridwidth=0.5, linewidth=0.75, tickwidth=0.75, ticklen=5 * SIZE)


def _head(figure: go.Figure, width: float, shown: bool) -> float:
    """Breaks title and subtitle, or takes them away; the pixels above the panels."""
    title = figure.layout.title
    notes = [note.text.count("<br>") + 1 for note in figure.layout.annotations if _is_above(note)]
    if not shown:
        title.update(text="", subtitle={"text": ""})
        return EDGE + LINE * max(notes, default=0)
    room = width - 2 * EDGE
    names = wrapped(re.sub("</?b>", "", title.text), _letters(room, BOLD * LARGE))
    lines = wrapped(title.subtitle.text, _letters(room, SMALL))
    title.update(text=f"<b>{'<br>'.join(names)}</b>", subtitle={"text": "<br>".join(lines)})
    more = LINE * (len(names) - 1)
    title.pad = {"l": EDGE, "t": EDGE + more / 2}  # Plotly raises a title of several lines by half
    return SIZE * ABOVE + LINE * (len(lines) + max(notes, default=1) - 1) + more


def _break_lines(figure: go.Figure, inner: float, panels: float) -> tuple[int, float]:
    """Breaks titles of axes and panels, and ticks.

    Returns how many more lines stand below the panels, and how many lines higher the panels must be
    so that as many have room between them.
    """
    below, titles = 0, 0
    columns = len({axis.domain for axis in _axes(figure, "xaxis")})
    for axis in _axes(figure, "xaxis"):
        room = inner * _share(axis)
        before = _breaks([axis.title.text or "", *(axis.ticktext or ())])
        axis.title.text = _broken(axis.title.text, room)
        if axis.ticktext and not axis.tickangle:
            each = room / len(axis.ticktext)
            axis.ticktext = [_broken(text, each) for text in axis.ticktext]
        below = max(below, _breaks([axis.title.text or "", *(axis.ticktext or ())]) - before)
    for axis in _axes(figure, "yaxis"):
        axis.title.text = _broken(axis.title.text, panels * _share(axis))
    for note in figure.layout.annotations:
        before = note.text.count("<br>")
        if _is_above(note):
            note.text = _broken(note.text, inner / columns)
            titles = max(titles, note.text.count("<br>") - before)
        elif note.xref == note.yref == "paper":
            note.text = _broken(note.text, panels if note.textangle else inner)
    rows = sorted({axis.domain for axis in _axes(figure, "yaxis") if axis.domain})
    gaps = [high[0] - low[1] for low, high in pairwise(rows)]
    return below, (below + titles) / min(gaps) if gaps and columns > 1 else 0.0


def _broken(text: str | None, room: float) -> str | None:
    return "<br>".join(wrapped(text, _letters(room, LARGE))) if text else text


def _breaks(texts: Iterable[str]) -> int:
    """The breaks of the title of an axis, and of its ticks' longest text."""
    title, *ticks = (text.count("<br>") for text in texts)
    return title + max(ticks, default=0)


def _is_above(note: Any) -> bool:
    """Whether an annotation is the title of a panel."""
    return bool(note.xref == note.yref == "paper" and not note.textangle and note.y > 0)


def _axes(figure: go.Figure, kind: str) -> Iterator[Any]:
    return (figure.layout[name] for name in figure.layout if re.fullmatch(rf"{kind}\d*", name))


def _share(axis: Any) -> float:
    low, high = axis.domain or (0, 1)
    return float(high - low)


def _letters(room: float, size: float) -> int:
    """How many letters of this size have room in a line."""
    return max(8, int(room / (LETTER * size)))
