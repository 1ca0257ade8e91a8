"""What each head's OV map makes of a vector, as a heat map; and heat maps of heads in general."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Shaped

from mechtv.analysis.head_maps import HeadMaps
from mechtv.evaluation.intervals import Estimate
from mechtv.plots.room import finished
from mechtv.plots.style import GRID, LOOKS, about, basis_text, fixed, interval_text, plain, titled

N_NUMBERED = 10
NEGATIVE, ZERO, POSITIVE = LOOKS["hidden_state"].color, "#ffffff", LOOKS["learned"].color
MOST_TICKS = 36
CELL, FRAME, LEAST, MOST = 24, 60, 250, 800  # heights in pixels
READINGS = {"frozen": "θ through the block's frozen norm", "none": "θ as it is, without the norm"}


def head_maps(maps: HeadMaps) -> go.Figure:
    """What each head would add to the logit difference by itself, attending to theta alone.

    The largest are numbered; at the pointer are norm, direction and tokens.
    """
    rows = maps.table().to_dict("records")
    return heat_map_of_heads(
        "What each head's OV map makes of θ",
        f"{about(maps.task, maps.provenance.model)} · θ at block {maps.injection_layer} · "
        f"n = {maps.contributions.shape[-1]} {maps.split} queries",
        f"Logit difference of the answer by the direct path, with full attention to θ; "
        f"{READINGS[maps.norm]}",
        values=maps.mean,
        layers=maps.layers,
        hovers=np.reshape([_hover(row) for row in rows], maps.mean.shape),
        unit="logits",
    )


def heat_map_of_heads(
    title: str,
    *lines: str,
    values: Float[np.ndarray, "layer head"],
    layers: Sequence[int],
    hovers: Shaped[np.ndarray, "layer head"],
    unit: str,
) -> go.Figure:
    """A signed number of every head: layers to the right, heads down, the largest numbered.

    The colours are symmetric about 0: blue raises the answer, orange lowers it.
    """
    n_layers, n_heads = values.shape
    shown = min(N_NUMBERED, values.size)
    figure = titled(
        title,
        *lines,
        f"Blue: for the answer, orange: against it; 1–{shown}: the largest of either sign",
        height=int(np.clip(FRAME + CELL * n_heads, LEAST, MOST)),
    )
    largest = float(np.abs(values).max()) or 1.0
    figure.add_trace(
        go.Heatmap(
            x=list(layers),
            z=values.T,
            zmin=-largest,
            zmax=largest,
            colorscale=[[0, NEGATIVE], [0.5, ZERO], [1, POSITIVE]],
            colorbar={"title": {"text": unit}},
            xgap=1,
            ygap=1,
            text=_numbered(values).T.tolist(),
            texttemplate="%{text}",
            hovertext=hovers.T.tolist(),
            hovertemplate="%{hovertext}<extra></extra>",
        )
    )
    figure.update_layout(plot_bgcolor=GRID)  # seen between the cells
    figure.update_xaxes(
        title_text="Block", showgrid=False, dtick=1 if n_layers <= MOST_TICKS else None
    )
    figure.update_yaxes(
        title_text="Head",
        showgrid=False,
        rangemode="normal",
        autorange="reversed",
        dtick=1 if n_heads <= MOST_TICKS else None,
    )
    return finished(figure)


def _numbered(values: Float[np.ndarray, "layer head"]) -> Shaped[np.ndarray, "layer head"]:
    """The ranks of the largest values by size, as texts; nothing for the others."""
    texts = np.full(values.size, "", dtype=object)
    for rank, place in enumerate(np.argsort(-np.abs(values).ravel(), kind="stable")[:N_NUMBERED]):
        texts[place] = str(rank + 1)
    return texts.reshape(values.shape)


def _hover(row: Mapping[Hashable, Any]) -> str:
    e = Estimate(value=row["value"], low=row["low"], high=row["high"], n=row["n"])
    return (
        f"<b>Block {row['layer']}, head {row['head']}</b><br>"
        f"{fixed(e.value, 3)} {interval_text(e, 3)} logits<br>"
        f"{basis_text(e)}<br>"
        f"norm {fixed(row['output norm'], 1)} · cosine with θ {fixed(row['cosine'])}<br>"
        f"attends to itself: {fixed(row['attention to itself'])}<br>"
        f"{plain(row['tokens'])}"
    )
