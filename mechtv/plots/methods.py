"""All methods side by side: a score against the layer of injection, a panel a task."""

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go

from mechtv.errors import InvalidInput
from mechtv.plots.panels import panels
from mechtv.plots.reference import reference_traces
from mechtv.plots.room import finished
from mechtv.plots.scores import FULL, Scale, about_rows, by_method, hovers, lines_without, marker
from mechtv.plots.style import error_bars, identity, look_of
from mechtv.study import MethodComparison
from mechtv.study.correlation import rows_with

COLUMNS = 3  # panels side by side
MOST_TICKS = 8


def accuracy_of_methods(comparison: MethodComparison, score: str = FULL) -> go.Figure:
    """A score against the injection layer: a panel a task, a line a method.

    Error bars and bands are 95 % intervals; what has no layer is a horizontal line. A click on a
    method in the legend hides it in every panel.

    Args:
        score: any of the comparison's scores, such as `accuracy, label-restricted`,
            `dNTP over vocabulary` (nats, logarithmic axis) or `log-probability` (nats). Tasks
            without it are left out and named.

    Raises:
        InvalidInput: if no task has the score, or no method has a layer.
    """
    table, scale = comparison.table(), Scale.of(score)
    rows = scale.shown(rows_with(table, score))
    layers = sorted(rows["layer"].dropna().astype(int).unique().tolist())
    if not layers:
        raise InvalidInput("No method here has a layer; methods_table_bars draws their scores.")
    figure, places = panels(
        f"{scale.name} by injection layer",
        [
            about_rows(rows),
            f"Error bars and bands: 95 % intervals{scale.note}",
            *lines_without(table, rows),
        ],
        rows["task"].unique().tolist(),
        columns=COLUMNS,
        titles=("Injection layer (block input)", scale.title),
    )
    edge = max(0.5, (layers[-1] - layers[0]) / 25)
    x = (layers[0] - edge, *map(float, layers), layers[-1] + edge)
    for (row, col), (_, own) in zip(places, rows.groupby("task", sort=False), strict=True):
        for name, label, part in reversed(by_method(own, table)):  # the first lies on top
            for trace in _line(name, label, part, scale, x):
                figure.add_trace(trace, row=row, col=col)
    ticks = layers if len(layers) <= MOST_TICKS else None
    figure.update_xaxes(range=(x[0], x[-1]), tickvals=ticks)
    figure.update_yaxes(scale.axis(rows["value"], rows["low"], rows["high"]))
    return finished(figure)


def _line(
    name: str, label: str, rows: pd.DataFrame, scale: Scale, x: Sequence[float]
) -> list[go.Scatter]:
    rows = rows.sort_values("layer")
    estimates = [scale.estimate(row) for row in rows.to_dict("records")]
    if rows["layer"].isna().all():
        return list(reference_traces(name, label, estimates[0], x, scale.unit))
    look = look_of(name)
    line = go.Scatter(
        **identity(name, label),
        x=rows["layer"].astype(int).tolist(),
        y=[estimate.value for estimate in estimates],
        error_y=error_bars(estimates) | {"thickness": 1, "width": 3},
        mode="lines+markers",
        line={"color": look.color, "dash": look.dash, "width": 2},
        marker=marker(name, 8 if len(rows) <= MOST_TICKS else 5),
        hovertext=hovers(label, rows, scale),
        hovertemplate="%{hovertext}<extra></extra>",
    )
    return [line]
