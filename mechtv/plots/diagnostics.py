"""Layer-wise diagnostics of several injection layers: panels by depth, a curve a layer."""

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go

from mechtv.analysis.alignment import Alignment
from mechtv.analysis.diagnostics import CHANGE, SIZE, STATE, Diagnostics
from mechtv.analysis.lens import FULL, LABELS
from mechtv.errors import InvalidInput
from mechtv.plots.lens import AXES, DEPTH, depth_curve
from mechtv.plots.room import finished
from mechtv.plots.style import (
    DEPTH_SYMBOLS,
    GRID,
    INK,
    MUTED,
    Look,
    about,
    depth_colors,
    fixed,
    look_of,
    plain,
    titled,
)

TITLES = AXES | {
    STATE: "Task alignment of the state",
    CHANGE: "Task alignment of the change",
    SIZE: "Size of the change (÷ plain state)",
}
ROW, GAP, BARS = 270, 76, 290  # pixels


def diagnostics_panels(result: Diagnostics) -> go.Figure:
    """By depth: accuracy, logit difference, alignment of the change, and size of the change.

    A curve an injection layer, from where its vector is added on; the plain run beside them. Bands
    are 95 % intervals over queries; the grey band holds 95 % of random vectors.
    """
    labelled = result.plain.correct_label is not None
    scores = [LABELS if labelled else FULL, "logit difference", CHANGE, SIZE]
    if result.span.is_everything:
        scores.remove(CHANGE)
    return _panels(result, "Layer by layer, behind each injection layer", scores)


def alignment_by_layer(result: Diagnostics) -> go.Figure:
    """The task alignment of states and of changes by depth, for each injection layer.

    Raises:
        InvalidInput: if the answers span the whole space, so that there is no alignment.
    """
    if result.span.is_everything:
        raise InvalidInput(
            f"The answers of {result.task!r} span the whole space, so there is no alignment to "
            "draw; give diagnostics fewer dimensions=."
        )
    return _panels(result, "Task alignment by depth", [STATE, CHANGE])


def alignment_bars(result: Alignment) -> go.Figure:
    """The task alignment of each vector, before the range of random ones (grey, 95 %)."""
    typical, low, high = result.span.of_random
    figure = titled(
        "Task alignment",
        f"{about(result.task, result.provenance.model)} · projection on the span of "
        f"{result.span.n_tokens} answers ({result.span.dim} of {result.span.width} dimensions)",
        f"Grey: 95 % of random vectors ({fixed(low)} to {fixed(high)}); line: {fixed(typical)}, "
        "their root mean square",
        height=BARS,
    )
    hovers = [
        f"<b>{plain(name)}</b><br>{fixed(value, 3)}<br>random: {fixed(low, 3)} to {fixed(high, 3)}"
        for name, value in zip(result.names, result.values, strict=True)
    ]
    bars = go.Bar(
        x=[plain(name) for name in result.names],
        y=result.values.tolist(),
        text=[fixed(value) for value in result.values],
        textposition="outside",
        marker_color=look_of("learned").color,
        width=0.5,
        showlegend=False,
        hovertext=hovers,
        hovertemplate="%{hovertext}<extra></extra>",
    )
    figure.add_trace(bars)
    figure.add_hrect(y0=low, y1=high, fillcolor=MUTED, opacity=0.2, line_width=0)
    figure.add_hline(y=typical, line={"color": INK, "width": 1, "dash": "dot"})
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_yaxes(title_text="Norm of the projection ÷ norm", range=[0, 1.05])
    return finished(figure)


def _panels(result: Diagnostics, title: str, scores: Sequence[str]) -> go.Figure:
    table = result.table()
    n_rows = (len(scores) + 1) // 2
    height = n_rows * ROW + (n_rows - 1) * GAP
    figure = titled(
        title,
        f"{about(result.task, result.provenance.model)} · n = {len(result.queries)} "
        f"{result.split} queries",
        f"Bands: 95 % intervals{_random(result, scores)}",
        height=height,
    )
    figure.set_subplots(
        rows=n_rows,
        cols=2,
        subplot_titles=[TITLES[score] for score in scores],
        horizontal_spacing=0.07,
        vertical_spacing=GAP / height if n_rows > 1 else 0,
    )
    figure.update_annotations(font_size=14)
    for number, score in enumerate(scores):
        place = {"row": number // 2 + 1, "col": number % 2 + 1}
        for trace in _curves(result, table[table["score"] == score]):
            figure.add_trace(trace, **place)
        if score in (STATE, CHANGE):
            _, low, high = result.span.of_random
            figure.add_hrect(y0=low, y1=high, fillcolor=GRID, line_width=0, layer="below", **place)
        if score in (FULL, LABELS):
            figure.update_yaxes(range=[-0.03, 1.03], **place)
    figure.update_xaxes(title_text=DEPTH, range=(-0.5, len(result.plain_state) - 0.5))
    return finished(figure)


def _curves(result: Diagnostics, rows: pd.DataFrame) -> list[go.Scatter]:
    """The plain run, then each layer from where its vector is added on."""
    traces = []
    if not (own := rows[rows["run"] == "plain"]).empty:
        look = look_of("zero-shot")
        traces += depth_curve(look, look.label, own, "plain")
    colors = depth_colors(len(result.layers))
    for number, (layer, color) in enumerate(zip(result.layers, colors, strict=True)):
        label = f"Vector at layer {layer}"
        look = Look(label=label, color=color, symbol=DEPTH_SYMBOLS[number % len(DEPTH_SYMBOLS)])
        own = rows[(rows["layer"] == layer) & (rows["depth"] >= layer)]
        traces += depth_curve(look, label, own, f"layer {layer}")
    return traces


def _random(result: Diagnostics, scores: Sequence[str]) -> str:
    if not {STATE, CHANGE} & set(scores):
        return ""
    _, low, high = result.span.of_random
    return (
        f"; grey: 95 % of random vectors ({fixed(low)} to {fixed(high)}; the answers span "
        f"{result.span.dim} of {result.span.width} dimensions)"
    )
