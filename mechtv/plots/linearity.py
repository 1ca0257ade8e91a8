"""How nearly linear an effect is: over the vector's scale, and by first-order predictions."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from mechtv.analysis.linearity import Linearity
from mechtv.analysis.linearity_battery import PREDICTIONS
from mechtv.errors import UnknownName
from mechtv.evaluation.intervals import Estimate
from mechtv.plots.room import finished
from mechtv.plots.style import LOOKS, MUTED, about, at_least, error_bars, fixed, hover, titled

ACCURACY = "accuracy, full vocabulary"
KINDS: dict[str, dict[str, Any]] = {
    "theta": {"color": LOOKS["learned"].color, "symbol": "circle", "dash": "solid", "shape": ""},
    "random": {
        "color": LOOKS["hidden_state"].color,
        "symbol": "square",
        "dash": "dash",
        "shape": "/",
    },
}
TITLES = ("Norm ratio by scale", "Cosine by scale", "First-order predictions", "Their fit, R²")
LOWEST = -1.0  # bars of R² are cut off here; the number stands below, the interval at the pointer
UPRIGHT = 6  # lines that are as high as an upright tick is long
ROOM = 0.3  # below the bars, for such numbers
HEIGHT = 640


def linearity(result: Linearity, *, score: str = ACCURACY) -> go.Figure:
    """Above, the effect of alpha theta against alpha times that of theta; below, predictions.

    In a linear model every norm ratio, cosine and R² is 1. Bars are accuracies of the plain state
    with the predicted effect added, between those of the zero-shot and of the injected run.

    Args:
        score: which accuracy; also `accuracy, label-restricted` where the task has labels.

    Raises:
        UnknownName: if the result has no such score.
    """
    table = result.table()
    known = [name for name in table["score"].unique() if name.startswith("accuracy")]
    if score not in known:
        raise UnknownName("score", score, known)
    nulls = f"random: mean over {result.n_null} vectors of the same norm; " if result.n_null else ""
    figure = titled(
        f"Is the effect linear? Vector added at block {result.layer}",
        f"{about(result.task, result.provenance.model)} · n = {result.n} {result.split} queries",
        f"Path average over {result.nodes} points; {nulls}whiskers: 95 % intervals over queries",
        height=HEIGHT,
    )
    figure.set_subplots(
        rows=2, cols=2, subplot_titles=TITLES, vertical_spacing=0.17, horizontal_spacing=0.16
    )
    for vector, look in KINDS.items():
        own = table[table["vector"] == vector]
        if len(own):
            _add_vector(figure, own, vector, look, score)
    _dress(figure, table, score)
    return finished(figure, tick_lines=UPRIGHT)


def _add_vector(
    figure: go.Figure, own: pd.DataFrame, vector: str, look: Mapping[str, Any], score: str
) -> None:
    scaling = own[(own["part"] == "scaling") & (own["alpha"] != 0)].sort_values("alpha")
    first_order = own[own["part"] == "first order"]
    label = "Vector θ" if vector == "theta" else "Random vectors"
    for column, name in ((1, "norm ratio"), (2, "cosine")):
        rows = scaling[scaling["score"] == name]
        figure.add_trace(_curve(rows, label, look, shown=column == 1), row=1, col=column)
    for column, name in ((1, score), (2, "R²")):
        rows = first_order[first_order["score"] == name].set_index("name")
        rows = rows.loc[[name for name in PREDICTIONS if name in rows.index]]
        figure.add_trace(_bars(rows, label, look), row=2, col=column)


def _curve(rows: pd.DataFrame, label: str, look: Mapping[str, Any], *, shown: bool) -> go.Scatter:
    estimates = _estimates(rows)
    return go.Scatter(
        x=rows["alpha"],
        y=rows["value"],
        error_y=error_bars(estimates),
        mode="lines+markers",
        line={"color": look["color"], "dash": look["dash"]},
        marker={"symbol": look["symbol"], "size": 9},
        name=label,
        legendgroup=label,
        showlegend=shown,
        hovertext=[
            hover(f"{label}, α = {alpha:g}", e)
            for alpha, e in zip(rows["alpha"], estimates, strict=True)
        ],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _bars(rows: pd.DataFrame, label: str, look: Mapping[str, Any]) -> go.Bar:
    estimates = _estimates(rows)
    cut = [e.value < LOWEST for e in estimates]
    ends = [at_least(e, LOWEST) for e in estimates]
    return go.Bar(
        x=list(rows.index),
        y=[e.value for e in ends],
        error_y=error_bars(ends),
        marker={"color": look["color"], "pattern": {"shape": look["shape"]}},
        name=label,
        legendgroup=label,
        showlegend=False,
        text=[fixed(e.value, 1) if gone else "" for e, gone in zip(estimates, cut, strict=True)],
        textposition="outside",
        textangle=0,
        hovertext=[
            hover(f"{label}, {name}", e) for name, e in zip(rows.index, estimates, strict=True)
        ],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _dress(figure: go.Figure, table: pd.DataFrame, score: str) -> None:
    figure.add_hline(y=1, line={"color": MUTED, "dash": "dot", "width": 1}, row=1, col="all")
    figure.update_annotations(font_size=14)
    figure.update_layout(barmode="group")
    figure.update_xaxes(title_text="Scale α of the vector", row=1)
    figure.update_yaxes(title_text="‖effect of αθ‖ / ‖α · effect of θ‖", row=1, col=1)
    cosine = table[table["score"] == "cosine"]["low"].min()
    figure.update_yaxes(title_text="Cosine of the two", range=[min(0, cosine), 1.05], row=1, col=2)
    figure.update_yaxes(title_text=score.capitalize(), range=[0, 1.05], row=2, col=1)
    fits = table[(table["part"] == "first order") & (table["score"] == "R²")]
    lowest = min(0.0, float(fits[["low", "value"]].min().min()) - 0.05)
    lowest = LOWEST - ROOM if lowest < LOWEST else lowest
    figure.update_yaxes(title_text="R² of the effect", range=[lowest, 1.1], row=2, col=2)
    figure.update_xaxes(tickangle=-90, row=2)


def _estimates(rows: pd.DataFrame) -> list[Estimate]:
    return [
        Estimate(value=value, low=low, high=high, n=n)
        for value, low, high, n in zip(
            rows["value"], rows["low"], rows["high"], rows["n"], strict=True
        )
    ]
