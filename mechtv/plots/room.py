"""The room that title, ticks and legend need, so that nothing lies over anything at 600 pixels."""

from collections.abc import Sequence

import plotly.graph_objects as go

ABOVE, LINE_HEIGHT = 66, 17  # pixels above the panels, and more for each line of the subtitle
BELOW, ROW_HEIGHT = 68, 21  # below them, and more for each row of the legend
NARROW = 600  # pixels of the narrowest figure that is to be read
SYMBOL, CHARACTER = 48, 7  # pixels of a legend entry's symbol and gaps, and of each character
SURE = 0.9  # of the width: letters of one system are wider than those of another


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
    below = BELOW + ticks + ROW_HEIGHT * legend_rows(legend_names(figure), NARROW - sides(figure))
    height = above + figure.layout.height + below
    return figure.update_layout(margin={"t": above, "b": below}, height=height)


def legend_names(figure: go.Figure) -> list[str]:
    """The entries of the legend, in its order."""
    if figure.layout.showlegend is False:
        return []
    shown = [trace for trace in figure.data if trace.name and trace.showlegend]
    ranks = [1000 if trace.legendrank is None else trace.legendrank for trace in shown]
    order = sorted(range(len(shown)), key=lambda place: ranks[place])
    return [shown[place].name for place in order]


def legend_rows(names: Sequence[str], width: int | float, *, size: float = 1.0) -> int:
    """How many rows a legend has below axes of this width, with letters of this size."""
    rows, used = 0, width
    for name in names:
        entry = SYMBOL + CHARACTER * size * len(name)
        fits = used + entry <= SURE * width
        rows, used = (rows, used + entry) if fits else (rows + 1, entry)
    return rows


def sides(figure: go.Figure) -> float:
    """Pixels left and right of the panels; a legend is no wider than these."""
    margin, usual = figure.layout.margin, figure.layout.template.layout.margin
    left, right = (usual[s] if margin[s] is None else margin[s] for s in ("l", "r"))
    return float(left + right)
