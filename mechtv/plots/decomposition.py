"""An exact decomposition drawn: signed contributions that add up to the measured change."""

import textwrap
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechtv.analysis.decomposition import Decomposition, Kind
from mechtv.evaluation import intervals
from mechtv.evaluation.intervals import Estimate
from mechtv.plots.head_maps import heat_map_of_heads
from mechtv.plots.room import finished
from mechtv.plots.style import (
    INK,
    MUTED,
    Look,
    about,
    basis_text,
    error_bars,
    estimate_text,
    fixed,
    interval_text,
    titled,
)

MEASURED, TICK = "Measured change", 18  # the last bar, and characters of a line of its tick
UPRIGHT = 8  # lines that are as high as an upright tick is long
LOGITS = "Change of the logit difference (logits)"

KINDS: dict[Kind, Look] = {
    "theta": Look(label="θ itself", color="#000000"),
    "values": Look(label="Attention: values", color="#0072b2", pattern="/"),
    "pattern": Look(label="Attention: pattern", color="#56b4e9", pattern="\\"),
    "product": Look(label="Attention: values × pattern", color="#332288", pattern="x"),
    "attention scale": Look(label="Attention: scale of its norm", color="#cc79a7", pattern="."),
    "MLP": Look(label="MLP", color="#e69f00"),
    "MLP scale": Look(label="MLP: scale of its norm", color="#f0e442", pattern="."),
    "final norm scale": Look(label="Scale of the final norm", color="#999999", pattern="-"),
}
"""The kinds of parts, in the order of the stream, as they are drawn everywhere."""


def decomposition(parts: Decomposition) -> go.Figure:
    """What each kind of part contributes to the logit difference, beside the measured change.

    Whiskers are 95 % intervals of the mean over queries.
    """
    figure = _figure("What a task vector's effect is made of", parts)
    for row in parts.by_kind().to_dict("records"):
        label = KINDS[row["kind"]].label
        figure.add_trace(_bar(label, _estimate(row), _hover(label, row), _marker(row["kind"])))
    measured = intervals.mean(parts.change)
    text = (
        f"<b>{MEASURED}</b>, the sum of all parts<br>{estimate_text(measured, 3)} logits<br>"
        f"{basis_text(measured)}"
    )
    outlined = {"color": "white", "line": {"color": INK, "width": 2}}
    figure.add_trace(_bar(MEASURED, measured, text, outlined))
    figure.update_layout(bargap=0.25)
    figure.update_xaxes(tickangle=-90)
    return finished(figure, tick_lines=UPRIGHT)


def decomposition_by_block(parts: Decomposition) -> go.Figure:
    """What each block contributes, by kind, and the running sum that ends at the measured change.

    Bars of one sign are stacked; theta comes first, the scale of the final norm last.
    """
    table = parts.summed("layer", "kind")
    places = [_place(row) for row in table.to_dict("records")]
    table = table.assign(place=places)
    figure = _figure("What each block adds to a task vector's effect", parts)
    for kind, look in KINDS.items():
        rows = table[table["kind"] == kind].to_dict("records")
        if rows:
            figure.add_trace(
                go.Bar(
                    name=look.label,
                    x=[row["place"] for row in rows],
                    y=[row["value"] for row in rows],
                    marker=_marker(kind),
                    hovertext=[_hover(f"{_where(row)}{look.label}", row) for row in rows],
                    hovertemplate="%{hovertext}<extra></extra>",
                )
            )
    figure.add_trace(_running_sum(table))
    figure.update_layout(barmode="relative", bargap=0.15)
    order = list(dict.fromkeys(places))
    figure.update_xaxes(
        title_text="Block", type="category", categoryorder="array", categoryarray=order
    )
    return finished(figure, tick_lines=3)


def decomposition_by_head(parts: Decomposition) -> go.Figure:
    """What each head contributes: values, pattern and product together; the largest numbered."""
    rows = parts.by_head()
    shape = (rows["layer"].nunique(), rows["head"].nunique())
    hovers = [
        _hover(f"Block {row['layer']}, head {row['head']}", row) for row in rows.to_dict("records")
    ]
    return heat_map_of_heads(
        "What each head adds to a task vector's effect",
        *_subtitle(parts),
        values=rows["value"].to_numpy(dtype=float).reshape(shape),
        layers=[int(layer) for layer in rows["layer"].unique()],
        hovers=np.reshape(hovers, shape),
        unit="logits",
    )


def _figure(title: str, parts: Decomposition) -> go.Figure:
    figure = titled(title, *_subtitle(parts), height=350)
    figure.add_hline(y=0, line={"color": MUTED, "width": 1})
    return figure.update_yaxes(title_text=LOGITS, rangemode="normal")


def _subtitle(parts: Decomposition) -> tuple[str, str]:
    where = about(parts.task, parts.provenance.model)
    measured = fixed(float(parts.change.mean()))
    return (
        f"{where} · θ at block {parts.layer} · n = {len(parts.change)} {parts.split} queries",
        f"Mean change of the answer's logit difference: {measured} logits; the parts add up to the "
        f"change of each query's state within {parts.error:.0e} of it",
    )


def _bar(label: str, estimate: Estimate, text: str, marker: dict[str, Any]) -> go.Bar:
    return go.Bar(
        x=["<br>".join(textwrap.wrap(label, TICK))],
        y=[estimate.value],
        error_y=error_bars([estimate]) | {"color": INK},
        marker=marker,
        hovertext=[text],
        hovertemplate="%{hovertext}<extra></extra>",
        showlegend=False,
    )


def _marker(kind: Kind) -> dict[str, Any]:
    look = KINDS[kind]
    over = {"fillmode": "overlay", "fgcolor": "white", "fgopacity": 0.7, "size": 7}
    line = {"width": 0.5, "color": "white"}
    return {"color": look.color, "pattern": {"shape": look.pattern, **over}, "line": line}


def _running_sum(table: pd.DataFrame) -> go.Scatter:
    sums = table.groupby("place", sort=False)["value"].sum().cumsum()
    return go.Scatter(
        name="Running sum, ending at the measured change",
        x=sums.index.tolist(),
        y=sums.tolist(),
        mode="lines+markers",
        line={"color": INK, "width": 2, "dash": "dot"},
        marker={"symbol": "circle-open", "size": 7},
        hovertemplate="Sum up to here: %{y:.2f} logits<extra></extra>",
    )


def _place(row: Mapping[Hashable, Any]) -> str:
    if pd.isna(row["layer"]):
        return "θ" if row["kind"] == "theta" else "final<br>norm"
    return str(row["layer"])


def _where(row: Mapping[Hashable, Any]) -> str:
    return "" if pd.isna(row["layer"]) else f"Block {row['layer']}, "


def _estimate(row: Mapping[Hashable, Any]) -> Estimate:
    return Estimate(value=row["value"], low=row["low"], high=row["high"], n=row["n"])


def _hover(label: str, row: Mapping[Hashable, Any]) -> str:
    e = _estimate(row)
    numbers = f"{fixed(e.value, 3)} {interval_text(e, 3)}".strip()
    share = "" if pd.isna(row["share"]) else f"<br>{fixed(100 * row['share'], 1)} % of the change"
    return f"<b>{label}</b><br>{numbers} logits{share}<br>{basis_text(e)}"
