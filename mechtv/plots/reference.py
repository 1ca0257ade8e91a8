"""A setting without a depth, drawn across a figure: a line with its interval as a band."""

from collections.abc import Sequence

import plotly.graph_objects as go

from mechtv.evaluation.intervals import Estimate
from mechtv.plots.style import channels, hover, identity, look_of

BAND_OPACITY = 0.13


def reference_traces(
    name: str, label: str, estimate: Estimate, x: Sequence[float], unit: str = ""
) -> tuple[go.Scatter, go.Scatter]:
    """The band and the line; `x` runs from one edge to the other, with a point at each depth."""
    return _band(name, label, estimate, x), _line(name, label, estimate, x, unit)


def _line(name: str, label: str, estimate: Estimate, x: Sequence[float], unit: str) -> go.Scatter:
    look = look_of(name)
    return go.Scatter(
        **identity(name, label),
        x=list(x),
        y=[estimate.value] * len(x),
        mode="lines",
        line={"color": look.color, "dash": look.dash, "width": 2},
        hovertext=[hover(label, estimate, unit)] * len(x),
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _band(name: str, label: str, estimate: Estimate, x: Sequence[float]) -> go.Scatter:
    edges = [x[0], x[-1], x[-1], x[0]]
    return go.Scatter(
        **identity(name, f"{label}, 95 % interval"),
        showlegend=False,
        x=edges,
        y=[estimate.low, estimate.low, estimate.high, estimate.high],
        mode="none",
        fill="toself",
        fillcolor=_transparent(look_of(name).color),
        hoverinfo="skip",
        zorder=-1,  # below bars, which else lie under every line and area
    )


def _transparent(color: str) -> str:
    red, green, blue = channels(color)
    return f"rgba({red},{green},{blue},{BAND_OPACITY})"
