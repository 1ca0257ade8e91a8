"""Panels with shared axes."""

import math
from collections.abc import Sequence

import plotly.graph_objects as go

from mechtv.plots.room import LINE_HEIGHT
from mechtv.plots.style import about, titled

ONE, MANY, BETWEEN = 380, 225, 52  # pixels of a single panel, of each of many, and between them
BESIDE = 0.025


def panels(
    title: str,
    lines: Sequence[str],
    names: Sequence[str],
    *,
    columns: int,
    titles: tuple[str, str],
    beside: float = BESIDE,
) -> tuple[go.Figure, list[tuple[int, int]]]:
    """Empty panels with shared axes, and the row and column of each.

    Args:
        names: of the panels; each line of a name is a line of its heading.
        beside: the share of the width between two panels.
    """
    n_rows, columns = evenly(len(names), columns)
    lines_more = max(name.count("\n") for name in names)
    places = [(1 + i // columns, 1 + i % columns) for i in range(len(names))]
    between = BETWEEN + LINE_HEIGHT * lines_more
    inner = ONE if n_rows == 1 else n_rows * (MANY + LINE_HEIGHT * lines_more)
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
        subplot_titles=[_heading(name) for name in names] if len(names) > 1 else None,
        x_title=titles[0],
        y_title=titles[1],
        horizontal_spacing=beside,
        vertical_spacing=between / inner,
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


def _heading(name: str) -> str:
    return "<br>".join(about(line) for line in name.split("\n"))
