"""Which heads a vector's effect needs: every head as a heat map, and key heads by layer."""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Shaped

from mechtv.analysis.circuits import Head
from mechtv.analysis.heads import HeadRanking
from mechtv.evaluation.intervals import Estimate
from mechtv.plots.room import finished
from mechtv.plots.style import GRID, INK, LOOKS, about, basis_text, estimate_text, titled

NEGATIVE, ZERO, POSITIVE = LOOKS["hidden_state"].color, "#ffffff", LOOKS["learned"].color
MOST_TICKS = 36  # labels, or numbers in cells, that stay legible side by side
MOST_COUNTS = 8  # labels on the axis of counts
CELL, FRAME, LEAST, MOST = 24, 220, 400, 940  # heights in pixels
LOWER = 0.25  # of the height, for the histogram
DIGITS = 4
UNITS = {"probability": "probability", "log-probability": "nats"}


def key_heads(ranking: HeadRanking, how_many: int | float = 0.1) -> go.Figure:
    """What heads are ranked by, layers from left to right; below, how many key heads a layer has.

    Key heads are numbered by rank; where cells are too small for that, they are framed.

    Args:
        how_many: as in `HeadRanking.top`: a count, or a share of the heads shown.
    """
    chosen = ranking.top(how_many)
    n_layers, n_heads = ranking.importance.shape
    numbered = max(n_layers, n_heads) <= MOST_TICKS
    height = int(np.clip(FRAME + CELL * n_heads, LEAST, MOST))
    figure = titled(
        "Key heads: the heads that the vector's effect needs",
        f"{about(ranking.task, ranking.provenance.model)} · θ at block {ranking.layer} · "
        f"n = {len(ranking.queries)} {ranking.split} queries",
        f"{ranking.measure[:1].upper()}{ranking.measure[1:]}; "
        f"{'numbered' if numbered else 'framed'}: the {len(chosen)} key heads of "
        f"{n_layers * n_heads}",
        height=height,
    )
    figure.set_subplots(
        rows=2, cols=1, shared_xaxes=True, row_heights=[1 - LOWER, LOWER], vertical_spacing=0.06
    )
    figure.add_trace(_map(ranking, len(chosen) if numbered else 0), row=1, col=1)
    counts = _histogram(ranking, how_many)
    figure.add_trace(counts, row=2, col=1)
    if not numbered:
        figure.add_trace(_frames(chosen), row=1, col=1)
    figure.update_layout(plot_bgcolor=GRID)
    blocks = {"range": [ranking.layer - 0.5, ranking.layer + n_layers - 0.5]}
    figure.update_xaxes(showgrid=False, dtick=1 if n_layers <= MOST_TICKS else None, **blocks)
    figure.update_xaxes(title_text="Block", row=2, col=1)
    heads = {"range": [n_heads - 0.5, -0.5], "dtick": 1 if n_heads <= MOST_TICKS else None}
    figure.update_yaxes(
        title_text="Head", showgrid=False, rangemode="normal", **heads, row=1, col=1
    )
    step = math.ceil(max(counts.y) / MOST_COUNTS)
    figure.update_yaxes(title_text="Key heads", gridcolor="white", dtick=step, row=2, col=1)
    return finished(figure)


def _map(ranking: HeadRanking, n_numbered: int) -> go.Heatmap:
    values, rows = ranking.importance, ranking.table().to_dict("records")
    largest = float(np.abs(values).max()) or 1.0
    signed = [[0, NEGATIVE], [0.5, ZERO], [1, POSITIVE]]
    texts = [str(row["rank"]) if row["rank"] <= n_numbered else "" for row in rows]
    unit = UNITS[ranking.score]
    return go.Heatmap(
        x=list(range(ranking.layer, ranking.layer + len(values))),
        z=values.T,
        zmin=-largest if ranking.change == "signed" else 0,
        zmax=largest,
        colorscale=signed if ranking.change == "signed" else [[0, ZERO], [1, POSITIVE]],
        colorbar={
            "title": {"text": unit.capitalize()},
            "len": 1 - LOWER, "y": 1, "yanchor": "top",
        },
        xgap=1,
        ygap=1,
        text=_grid(texts, values.shape),
        texttemplate="%{text}",
        hovertext=_grid([_hover(row, unit) for row in rows], values.shape),
        hovertemplate="%{hovertext}<extra></extra>",
    )  # fmt: skip


def _histogram(ranking: HeadRanking, how_many: int | float) -> go.Bar:
    table = ranking.histogram(how_many)
    return go.Bar(
        x=table["layer"],
        y=table["key_heads"],
        marker={"color": POSITIVE},
        customdata=table["n_heads"],
        hovertemplate="<b>Block %{x}</b><br>%{y} key heads of %{customdata}<extra></extra>",
        showlegend=False,
    )


def _frames(heads: Sequence[Head]) -> go.Scatter:
    return go.Scatter(
        x=[layer for layer, _ in heads],
        y=[head for _, head in heads],
        mode="markers",
        marker={"symbol": "square-open", "size": 9, "color": INK, "line": {"width": 1.5}},
        hoverinfo="skip",
        showlegend=False,
    )


def _grid(texts: list[str], shape: tuple[int, ...]) -> list[list[str]]:
    """One text a head, as rows of heads x columns of layers."""
    grid: Shaped[np.ndarray, "layer head"] = np.reshape(np.array(texts, dtype=object), shape)
    rows: list[list[str]] = grid.T.tolist()
    return rows


def _hover(row: Mapping[Hashable, Any], unit: str) -> str:
    e = Estimate(value=row["value"], low=row["low"], high=row["high"], n=row["n"])
    return (
        f"<b>Block {row['layer']}, head {row['head']}</b> (rank {row['rank']})<br>"
        f"{estimate_text(e, DIGITS, unit)}<br>{basis_text(e)}"
    )
