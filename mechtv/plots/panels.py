"""Panels with shared axes, and the room that title, ticks and legend need."""

import math
from collections.abc import Sequence

import plotly.graph_objects as go

from mechtv.plots.style import about, titled

ABOVE, LINE_HEIGHT = 66, 17  # pixels above the panels, and more for each line of the subtitle
BELOW, ENTRY_HEIGHT = 62, 31  # below them, and more for each row of the legend
ENTRIES, LEGEND_ROWS = 4, 2  # in a row of a narrow legend, and its rows at least
ONE, MANY, BETWEEN = 380, 225, 52  # pixels of a single panel, of each of many, and between them


def panels(
    title: str, lines: Sequence[str], names: Sequence[str], *, columns: int, titles: tuple[str, str]
) -> tuple[go.Figure, list[tuple[int, int]]]:
    """Empty panels with shared axes, and the row and column of each."""
    n_rows, columns = evenly(len(names), columns)
    places = [(1 + i // columns, 1 + i % columns) for i in range(len(names))]
    inner = ONE if n_rows == 1 else n_rows * MANY
    figure = titled(title, *lines, height=inner)
    figure.set_subplots(
        rows=n_rows,
        cols=columns,
        shared_xaxes="all" if columns > 1 else False,
        shared_yaxes="all",
        specs=[
            [{} if (row + 1, column + 1) in places else None for column in range(columns)]
            for row in range(n_rows)
        ],
        subplot_titles=[about(name) for name in names] if len(names) > 1 else None,
        x_title=titles[0],
        y_title=titles[1],
        horizontal_spacing=0.025,
        vertical_spacing=BETWEEN / inner,
    )
    figure.update_annotations(font_size=14)
    figure.update_annotations(selector={"textangle": -90}, xshift=-46)
    for row, column in places[-columns:]:  # nothing is below them, so they show their ticks
        figure.update_xaxes(showticklabels=True, row=row, col=column)
    return figure, places


def evenly(n: int, most: int) -> tuple[int, int]:
    """How many rows, and how many in each (but the last), for `n` of which `most` fit in a row."""
    n_rows = math.ceil(n / most)
    return n_rows, math.ceil(n / n_rows)


def finished(figure: go.Figure, tick_lines: int = 1) -> go.Figure:
    """One legend entry a setting, and room for the legend and for the lines above.

    The height was that of the panels alone.
    """
    seen: set[str] = set()
    for trace in figure.data:
        if trace.showlegend is not False:
            trace.showlegend = trace.legendgroup not in seen
            seen.add(trace.legendgroup)
    above = ABOVE + LINE_HEIGHT * (1 + figure.layout.title.subtitle.text.count("<br>"))
    legend = ENTRY_HEIGHT * max(LEGEND_ROWS, math.ceil(len(seen) / ENTRIES))
    below = BELOW + LINE_HEIGHT * max(0, tick_lines - 2) + legend
    height = above + figure.layout.height + below
    margin = {"t": above, "b": below}
    return figure.update_layout(margin=margin, height=height, title_y=1 - 14 / height)
