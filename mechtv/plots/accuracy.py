"""Accuracy against the depth at which a vector is injected."""

from collections.abc import Sequence

import plotly.graph_objects as go

from mechtv.overview import Overview, Setting
from mechtv.plots.reference import reference_traces
from mechtv.plots.room import finished
from mechtv.plots.style import about, error_bars, hover, identity, label_of, look_of, titled

MOST_TICKS = 12


def accuracy_by_layer(overview: Overview) -> go.Figure:
    """Full-vocabulary accuracy of the vectors at each depth, beside the model without a vector.

    Error bars and bands are 95 % intervals. Settings without a depth are horizontal lines.
    """
    n = overview.settings[0].evaluation.accuracy.n
    figure = titled(
        "Accuracy by injection layer",
        f"{about(overview.task.name, overview.model.name)} · n = {n} test queries",
        "Full vocabulary; bars and bands are 95 % intervals",
        height=270,
    )
    n_layers = overview.model.n_layers
    edges = (-0.5, n_layers - 0.5)
    for setting in (s for s in overview.settings if s.layer is None):
        label = label_of(setting.name, overview.shots)
        x = (edges[0], *map(float, range(n_layers)), edges[1])
        figure.add_traces(reference_traces(setting.name, label, setting.evaluation.accuracy, x))
    for name, settings in by_method(overview).items():
        figure.add_trace(_vector_trace(name, label_of(name, overview.shots), settings))
    figure.update_yaxes(title_text="Accuracy (full vocabulary)", range=[-0.03, 1.03], dtick=0.2)
    figure.update_xaxes(
        title_text=f"Injection layer (block input; the model has blocks 0–{n_layers - 1})",
        range=edges,
    )
    if len(overview.layers) <= MOST_TICKS:
        figure.update_xaxes(tickvals=overview.layers)
    return finished(figure)


def by_method(overview: Overview) -> dict[str, list[Setting]]:
    """The settings that have a depth, by name: the learned vector first, depths in order."""
    vectors = [s for s in overview.settings if s.layer is not None]
    names = sorted({s.name for s in vectors}, key=lambda name: (name != "learned", name))
    return {
        name: sorted((s for s in vectors if s.name == name), key=lambda s: s.layer or 0)
        for name in names
    }


def _vector_trace(name: str, label: str, settings: Sequence[Setting]) -> go.Scatter:
    look = look_of(name)
    estimates = [s.evaluation.accuracy for s in settings]
    return go.Scatter(
        **identity(name, label),
        x=[s.layer for s in settings],
        y=[e.value for e in estimates],
        error_y=error_bars(estimates),
        mode="lines+markers",
        line={"color": look.color, "dash": look.dash, "width": 2.5},
        marker={"symbol": look.symbol, "size": 10},
        hovertext=[
            hover(f"{label}, layer {s.layer}", e) for s, e in zip(settings, estimates, strict=True)
        ],
        hovertemplate="%{hovertext}<extra></extra>",
    )
