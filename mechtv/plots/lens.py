"""The logit lens by depth: curves of the plain and the injected run, and their top tokens."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechtv.analysis.lens import FULL, LABELS
from mechtv.analysis.logit_lens import Lens
from mechtv.evaluation.intervals import Estimate
from mechtv.plots.room import finished
from mechtv.plots.style import (
    LOOKS,
    MUTED,
    Look,
    about,
    basis_text,
    channels,
    estimate_text,
    look_of,
    plain,
    titled,
)

AXES = {
    FULL: "Accuracy (full vocabulary)",
    LABELS: "Accuracy (label-restricted)",
    "log-probability": "Log-probability of the answer (nats)",
    "logit difference": "Logit difference (answer − rivals)",
    "log10 rank": "Rank of the answer (log₁₀; 0 is the top)",
}
DEPTH = "Depth (blocks passed)"
PANEL, CELL = 340, 21  # pixels
LONGEST, IN_CELL = 14, 8  # characters of a token at the pointer, and in a narrow cell
SIGNS = {"\n": "↵", "\t": "⇥", "\xa0": "⍽", " ": "·"}


def lens_curves(lens: Lens) -> go.Figure:
    """What the lens reads at each depth: accuracy, logit difference and rank of the answer.

    The curves part at the first depth that the vector can change; bands are 95 % intervals.
    """
    table = lens.table()
    scores = [FULL if lens.plain.correct_label is None else LABELS, "logit difference"]
    scores.append("log10 rank")
    figure = titled(
        "What the logit lens reads at each depth",
        f"{about(lens.task, lens.provenance.model)} · n = {len(lens.queries)} {lens.split} queries",
        f"Bands: 95 % intervals{_where(lens)}; the last depth is the model's output",
        height=PANEL,
    )
    titles = [AXES[score].replace(" (", "<br>(") for score in scores]
    figure.set_subplots(rows=1, cols=3, subplot_titles=titles, horizontal_spacing=0.06)
    figure.update_annotations(font_size=14)
    for column, score in enumerate(scores, start=1):
        for run, rows in table[table["score"] == score].groupby("run", sort=False):
            setting = "zero-shot" if run == "plain" else lens.setting
            look = look_of(setting)
            figure.add_traces(depth_curve(look, look.label, rows, setting), rows=1, cols=column)
    if lens.layer is not None:
        figure.add_vline(x=lens.layer, line={"color": MUTED, "width": 1, "dash": "dot"})
    figure.update_xaxes(title_text=DEPTH)
    figure.update_yaxes(rangemode="normal")
    figure.update_yaxes(range=[-0.03, 1.03], col=1)
    return finished(figure)


def lens_tokens(lens: Lens) -> go.Figure:
    """The top tokens of the mean state at each depth, the plain run beside the injected one.

    The colour is the logit, from each run's own least to its 95th percentile.
    """
    runs = {"plain": look_of("zero-shot").label}
    if lens.injected is not None:
        runs["injected"] = look_of(lens.setting).label
    n_depths, k = len(lens.plain.rank), int(lens.tokens["rank"].max())
    theta = lens.tokens.loc[lens.tokens["state"] == "theta", "token"].tolist()
    own = [f"θ itself: {'  '.join(map(token_text, theta))}"] if theta else []
    figure = titled(
        "What the mean state says at each depth",
        f"{about(lens.task, lens.provenance.model)} · n = {len(lens.queries)} {lens.split} queries",
        f"Top {k} tokens under the logit lens{_where(lens)}; · is a space",
        *own,
        height=n_depths * CELL,
    )
    figure.set_subplots(
        rows=1,
        cols=len(runs),
        shared_yaxes=True,
        subplot_titles=list(runs.values()),
        horizontal_spacing=0.02,
    )
    figure.update_annotations(font_size=14)
    for column, run in enumerate(runs, start=1):
        figure.add_trace(_strip(lens.tokens[lens.tokens["state"] == run]), row=1, col=column)
    if lens.layer is not None:
        edge = {"color": LOOKS["hidden_state"].color, "width": 2, "dash": "dot"}
        figure.add_hline(y=lens.layer - 0.5, line=edge)
    figure.update_xaxes(title_text="Rank", dtick=1, showgrid=False)
    figure.update_yaxes(autorange="reversed", showgrid=False, rangemode="normal", dtick=1)
    figure.update_yaxes(title_text=DEPTH, col=1)
    return finished(figure)


def depth_curve(look: Look, label: str, rows: pd.DataFrame, group: str) -> list[go.Scatter]:
    """A score by depth with the band of its 95 % interval."""
    rows = rows.sort_values("depth")
    depths = rows["depth"].tolist()
    red, green, blue = channels(look.color)
    quiet = {"legendgroup": group, "showlegend": False, "hoverinfo": "skip"}
    band = go.Scatter(
        x=[*depths, *depths[::-1]],
        y=[*rows["high"], *rows["low"].tolist()[::-1]],
        mode="lines",
        line={"width": 0},
        fill="toself",
        fillcolor=f"rgba({red}, {green}, {blue}, 0.14)",
        **quiet,
    )
    line = go.Scatter(
        name=plain(label),
        legendgroup=group,
        x=depths,
        y=rows["value"].tolist(),
        mode="lines+markers",
        line={"color": look.color, "dash": look.dash, "width": 2},
        marker={"symbol": look.symbol, "color": look.color, "size": 6},
        hovertext=[_hover(label, row) for row in rows.to_dict("records")],
        hovertemplate="%{hovertext}<extra></extra>",
    )
    return [band, line]


def token_text(token: str, longest: int = LONGEST) -> str:
    """A token as a figure can show it: blanks as signs, long ones cut."""
    for blank, sign in SIGNS.items():
        token = token.replace(blank, sign)
    return plain(token if len(token) <= longest else f"{token[: longest - 1]}…")


def _strip(tokens: pd.DataFrame) -> go.Heatmap:
    """Depths from top to bottom, ranks from left to right."""
    logits = tokens.pivot(index="depth", columns="rank", values="logit")
    texts = tokens.pivot(index="depth", columns="rank", values="token")
    return go.Heatmap(
        x=logits.columns.tolist(),
        y=logits.index.tolist(),
        z=logits.to_numpy(),
        zmin=float(logits.min().min()),
        zmax=float(np.quantile(logits, 0.95)),  # one depth, often 0, may be far above the others
        text=texts.map(lambda token: token_text(token, IN_CELL)).to_numpy(),
        texttemplate="%{text}",
        textfont={"size": 11},
        customdata=texts.map(token_text).to_numpy(),
        colorscale=[[0, "#ffffff"], [1, LOOKS["i2cl"].color]],
        showscale=False,
        xgap=1,
        ygap=1,
        hovertemplate="Depth %{y}, rank %{x}: <b>%{customdata}</b><br>"
        "logit %{z:.2f}<extra></extra>",
    )


def _where(lens: Lens) -> str:
    first = f"; dotted line: {lens.layer}, the first depth that the vector can change"
    return "" if lens.layer is None else first


def _hover(label: str, row: Mapping[object, object]) -> str:
    numbers = {name: float(str(row[name])) for name in ("value", "low", "high")}
    estimate = Estimate(**numbers, n=int(str(row["n"])))
    return (
        f"<b>{plain(label)}</b>, depth {row['depth']}<br>{estimate_text(estimate)}<br>"
        f"{basis_text(estimate)}"
    )
