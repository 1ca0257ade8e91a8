"""The room that title, ticks and legend need, so that nothing lies over anything at 600 pixels."""

from collections.abc import Sequence

import plotly.graph_objects as go

ABOVE, LINE_HEIGHT = 66, 17  # pixels above the panels, and more for each line of the subtitle
BELOW, ROW_HEIGHT = 68, 21  # below them, and more for each row of the legend
NARROW = 600 - 98  # between the axes of the narrowest figure that is to be read; as a legend is
SYMBOL, CHARACTER = 48, 7  # pixels of a legend entry's symbol and gaps, and of each character


def finished(figure: go.Figure, tick_lines: int = 1) -> go.Figure:
    """One legend entry a setting, and room for the legend and for the lines above.

    The height was that of the panels alone.
    """
    seen: set[str] = set()
    for trace in figure.data:
        if trace.name and trace.showlegend is not False:
            trace.legendgroup = trace.legendgroup or trace.name
            trace.showlegend = trace.legendgroup not in seen
            seen.add(trace.legendgroup)
    titles = max((note.text.count("<br>") for note in figure.layout.annotations), default=0)
    lines = 1 + figure.layout.title.subtitle.text.count("<br>") + titles
    above = ABOVE + LINE_HEIGHT * lines
    ticks = LINE_HEIGHT * max(0, tick_lines - 2)
    below = BELOW + ticks + ROW_HEIGHT * legend_rows(legend_names(figure), NARROW)
    height = above + figure.layout.height + below
    return figure.update_layout(margin={"t": above, "b": below}, height=height)


def legend_names(figure: go.Figure) -> list[str]:
    """The entries of the legend, in its order."""
    if figure.layout.showlegend is False:
        return []
    shown = [trace for trace in figure.data if trace.name and trace.showlegend]
    return [trace.name for trace in sorted(shown, key=lambda t: t.legendrank or 1000)]


def legend_rows(names: Sequence[str], width: int | float, *, size: float = 1.0) -> int:
    """How many rows a legend has below axes of this width, with letters of this size."""
    rows, used = 0, width
    for name in names:
        entry = SYMBOL + CHARACTER * size * len(name)
        rows, used = (rows + 1, entry) if used + entry > width else (rows, used + entry)
    return rows
