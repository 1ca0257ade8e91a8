"""Which heads carry a task: the average indirect effect of every head as a heat map."""

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechtv.evaluation.intervals import Estimate
from mechtv.methods.head_effects import HeadEffects
from mechtv.plots.room import finished
from mechtv.plots.style import GRID, LOOKS, about, basis_text, fixed, interval_text, titled

N_NUMBERED = 10
DIGITS = 4
NEGATIVE, ZERO, POSITIVE = LOOKS["hidden_state"].color, "#ffffff", LOOKS["learned"].color
MOST_TICKS = 36
CELL, FRAME, LEAST, MOST = 24, 60, 250, 800  # heights in pixels


def head_effects(effects: HeadEffects) -> go.Figure:
    """The AIE of every head, layers from left to right, the ten strongest heads numbered.

    The colours are symmetric about 0: blue heads raise the right answer's probability on shuffled
    prompts, orange ones lower it.
    """
    where = about(effects.task, effects.provenance.model)
    figure = titled(
        f"Average indirect effect of each head, {effects.shots} shots",
        f"{where} · n = {effects.n_shuffled} shuffled prompts",
        f"Change in p(answer) when the head's output is its mean over {effects.n} clean prompts; "
        f"1–{min(N_NUMBERED, effects.mean.size)}: strongest heads",
        height=int(np.clip(FRAME + CELL * effects.mean.shape[1], LEAST, MOST)),
    )
    figure.add_trace(_map(effects))
    figure.update_layout(plot_bgcolor=GRID)  # seen between the cells
    figure.update_xaxes(title_text="Layer", showgrid=False)
    figure.update_yaxes(title_text="Head", showgrid=False, rangemode="normal", autorange="reversed")
    for update, n in zip(
        (figure.update_xaxes, figure.update_yaxes), effects.mean.shape, strict=True
    ):
        if n <= MOST_TICKS:
            update(dtick=1)
    return finished(figure)


def _map(effects: HeadEffects) -> go.Heatmap:
    table = effects.table()
    strongest = float(np.abs(effects.mean).max()) or 1.0
    return go.Heatmap(
        z=effects.mean.T,
        zmin=-strongest,
        zmax=strongest,
        colorscale=[[0, NEGATIVE], [0.5, ZERO], [1, POSITIVE]],
        colorbar={"title": {"text": "AIE"}},
        xgap=1,
        ygap=1,
        text=_grid(table, table["rank"].map(lambda rank: str(rank) if rank <= N_NUMBERED else "")),
        texttemplate="%{text}",
        hovertext=_grid(table, pd.Series([_hover(row) for row in table.to_dict("records")])),
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _grid(table: pd.DataFrame, texts: pd.Series) -> list[list[str]]:
    """One text a head, as rows of heads x columns of layers."""
    grid = table.assign(text=texts).pivot(index="head", columns="layer", values="text")
    rows: list[list[str]] = grid.to_numpy().tolist()
    return rows


def _hover(row: Mapping[Hashable, Any]) -> str:
    estimate = Estimate(value=row["effect"], low=row["low"], high=row["high"], n=row["n"])
    numbers = f"{fixed(estimate.value, DIGITS)} {interval_text(estimate, DIGITS)}".strip()
    return (
        f"<b>Layer {row['layer']}, head {row['head']}</b> (rank {row['rank']})<br>{numbers}<br>"
        + basis_text(estimate)
    )
