"""How training went: validation accuracy and losses, epoch by epoch, one colour a depth."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from mechtv.overview import Overview
from mechtv.plots.room import finished
from mechtv.plots.style import DEPTH_SYMBOLS, MUTED, about, depth_colors, fixed, titled

LOSSES = {"validation": "solid", "train": "dot"}


@dataclass(frozen=True, kw_only=True)
class _Depth:
    """One learned vector's curve, and how it is drawn."""

    layer: int
    curve: pd.DataFrame
    color: str
    symbol: str


def training_curves(overview: Overview) -> go.Figure:
    """Validation accuracy above, training and validation loss below; epoch 0 is before training.

    The large marker is the epoch whose vector was kept (best validation accuracy, then loss).
    """
    figure = titled(
        "Training of the learned vectors",
        f"{about(overview.task.name, overview.model.name)} · {_sizes(overview)}",
        "Epoch 0: before training; large marker: the epoch that was kept",
        height=450,
    )
    figure.set_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.06)
    for depth in _depths(overview.curves()):
        figure.add_trace(_accuracy(depth), row=1, col=1)
        for split in LOSSES:
            figure.add_trace(_loss(depth, split), row=2, col=1)
    figure.add_traces([_legend_line(split) for split in LOSSES], rows=2, cols=1)
    accuracy = "Validation accuracy<br>(exact match)"
    figure.update_yaxes(title_text=accuracy, range=[-0.03, 1.03], row=1, col=1)
    figure.update_yaxes(title_text="Loss<br>(nats per answer token)", row=2, col=1)
    figure.update_xaxes(title_text="Epoch", dtick=1, row=2, col=1)
    return finished(figure)


def kept_epoch(curve: pd.DataFrame) -> int:
    """The epoch whose vector training returned: best validation accuracy, then lowest loss."""
    columns = ["validation_accuracy", "validation_loss", "epoch"]
    ranked = curve.sort_values(columns, ascending=[False, True, True])
    return int(ranked["epoch"].iloc[0])


def _depths(curves: pd.DataFrame) -> list[_Depth]:
    layers = sorted(int(layer) for layer in curves["layer"].unique())
    return [
        _Depth(
            layer=layer,
            curve=curves[curves["layer"] == layer].sort_values("epoch"),
            color=color,
            symbol=DEPTH_SYMBOLS[index % len(DEPTH_SYMBOLS)],
        )
        for index, (layer, color) in enumerate(zip(layers, depth_colors(len(layers)), strict=True))
    ]


def _sizes(overview: Overview) -> str:
    vector = overview["learned", overview.best_layer].vector
    settings: Mapping[str, Any] = {} if vector is None else vector.card.settings
    train, validation = settings.get("n_train"), settings.get("n_validation")
    return f"n = {train} training, {validation} validation queries"


def _accuracy(depth: _Depth) -> go.Scatter:
    kept = kept_epoch(depth.curve)
    trace = _line(depth, "validation_accuracy", "validation accuracy", "")
    sizes = [14 if epoch == kept else 6 for epoch in depth.curve["epoch"]]
    trace.update(name=f"Layer {depth.layer}", mode="lines+markers", showlegend=True)
    trace.update(marker={"symbol": depth.symbol, "size": sizes, "opacity": 1, "line": {"width": 0}})
    return trace


def _loss(depth: _Depth, split: str) -> go.Scatter:
    trace = _line(depth, f"{split}_loss", f"{split} loss", " nats")
    trace.update(line_dash=LOSSES[split])
    if split == "validation":
        trace.update(mode="lines+markers", marker={"symbol": depth.symbol, "size": 6})
    return trace


def _line(depth: _Depth, column: str, what: str, unit: str) -> go.Scatter:
    """A curve without the epochs that have no such score (epoch 0 has no training loss)."""
    curve = depth.curve.dropna(subset=[column])
    return go.Scatter(
        name=f"Layer {depth.layer}, {what}",
        legendgroup=f"layer {depth.layer}",
        showlegend=False,
        x=curve["epoch"].astype(int).tolist(),
        y=curve[column].tolist(),
        mode="lines",
        line={"color": depth.color, "width": 2},
        hovertext=[
            f"<b>Layer {depth.layer}</b>, epoch {epoch:.0f}<br>{what} {fixed(value, 3)}{unit}"
            for epoch, value in zip(curve["epoch"], curve[column], strict=True)
        ],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _legend_line(split: str) -> go.Scatter:
    line = {"color": MUTED, "dash": LOSSES[split], "width": 2}
    name = {"train": "training loss"}.get(split, f"{split} loss")
    return go.Scatter(name=name, x=[None], y=[None], mode="lines", line=line)
