"""Protocol L4: what the OV circuits, or the MLPs, do in theta's place, against theta's layer."""

from collections.abc import Hashable, Mapping
from itertools import pairwise
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from mechtv.analysis.reconstructed import (
    BOTH,
    FULL,
    MLP,
    OV,
    RECOVERED,
    ZERO,
    Reconstruction,
    ReconstructionByLayer,
)
from mechtv.evaluation.intervals import Estimate
from mechtv.plots.panels import panels
from mechtv.plots.room import finished
from mechtv.plots.style import INK, LOOKS, Look, about, error_bars, hover, plain

PARTS = {
    FULL: Look(label="Whole vector θ", color=LOOKS["learned"].color),
    OV: Look(
        label="OV circuits only", color=LOOKS["hidden_state"].color, symbol="square", dash="dash"
    ),
    MLP: Look(
        label="MLPs only", color=LOOKS["in-context"].color, symbol="diamond", dash="longdashdot"
    ),
    BOTH: Look(
        label="OV circuits and MLPs",
        color=LOOKS["function_vector"].color,
        symbol="triangle-up",
        dash="dashdot",
    ),
    ZERO: Look(label="Zero-shot", color=INK, symbol="x", dash="dot"),
}
NULLS = {
    "norm": Look(label="Random, norm as OV", color="#999999", symbol="line-ew-open"),
    "norm and cosine": Look(
        label="Random, norm and cosine as OV", color="#e69f00", symbol="line-ew-open"
    ),
}
FULL_VOCABULARY, LABELS = "accuracy, full vocabulary", "accuracy, label-restricted"
DODGE = 0.09  # of a layer: how far apart the parts of one layer stand
LINE = {"width": 2}


def reconstruction(found: Reconstruction | ReconstructionByLayer) -> go.Figure:
    """Accuracy and the recovered share of theta's gain, for each part, layer by layer.

    Accuracy is label-restricted where there are labels. Bars are 95 % intervals over queries; the
    bars of random vectors run from their lowest to their highest draw.
    """
    layers = found.layers if isinstance(found, ReconstructionByLayer) else (found,)
    table = pd.concat([one.table() for one in layers], ignore_index=True)
    accuracy = LABELS if (table["score"] == LABELS).any() else FULL_VOCABULARY
    titles = {accuracy: _title(accuracy), RECOVERED: "Share of θ's gain recovered"}
    figure, places = panels(
        "OV and MLP reconstruction by layer" if len(layers) > 1 else "OV and MLP reconstruction",
        [_about(table), _how(layers[0])],
        list(titles.values()),
        columns=2,
        titles=("Layer at whose input θ is added", "Accuracy, and share of the gain"),
    )
    figure.update_yaxes(matches=None, showticklabels=True, zeroline=True, zerolinecolor=INK)
    order = sorted({one.layer for one in layers})
    step = min((b - a for a, b in pairwise(order)), default=1)
    for score, (row, column) in zip(titles, places, strict=True):
        rows = table[table["score"] == score]
        figure.add_traces(_traces(rows, score, DODGE * step), rows=row, cols=column)
        axis = {"range": [-0.03, 1.03], "dtick": 0.2} if score == accuracy else _axis(rows)
        figure.update_yaxes(axis, row=row, col=column)
    figure.update_xaxes(tickvals=order, range=[order[0] - step / 2, order[-1] + step / 2])
    figure.update_yaxes(side="right", col=2)
    figure.update_layout(margin={"l": 84, "r": 52})
    return finished(figure)


def _traces(rows: pd.DataFrame, score: str, dodge: float) -> list[go.Scatter]:
    looks = [(part, "", look) for part, look in PARTS.items()]
    looks += [(OV, kind, look) for kind, look in NULLS.items()]
    shown = [
        (part, null, look, rows[(rows["part"] == part) & (rows["null"] == null)])
        for part, null, look in looks
    ]
    shown = [one for one in shown if len(one[3])]
    middle = (len(shown) - 1) / 2
    return [
        _trace(look, some.sort_values("layer"), score, (place - middle) * dodge, f"{part}{null}")
        for place, (part, null, look, some) in enumerate(shown)
    ]


def _trace(look: Look, rows: pd.DataFrame, score: str, shift: float, group: str) -> go.Scatter:
    is_null = bool((rows["null"] != "").any())
    ends = ("lowest", "highest") if is_null else ("low", "high")
    records = rows.to_dict("records")
    shown = [
        Estimate(value=row["value"], low=row[ends[0]], high=row[ends[1]], n=row["n"])
        for row in records
    ]
    return go.Scatter(
        name=plain(look.label),
        legendgroup=group,
        x=(rows["layer"] + shift).tolist(),
        y=rows["value"].tolist(),
        mode="lines+markers" if len(rows) > 1 and not is_null else "markers",
        line={"color": look.color, "dash": look.dash, "width": 1.5},
        marker={"symbol": look.symbol, "color": look.color, "size": 9, "line": LINE},
        error_y=error_bars(shown) | {"color": look.color},
        hovertext=[_hover(look, row, one, score) for row, one in zip(records, shown, strict=True)],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _hover(look: Look, row: Mapping[Hashable, Any], shown: Estimate, score: str) -> str:
    text = hover(f"{look.label}, layer {row['layer']}", shown)
    if row["null"]:
        text = text.replace("95 % interval", f"lowest and highest of {row['draws']} draws")
    return f"{text}<br>{plain(score)}"


def _axis(rows: pd.DataFrame) -> dict[str, object]:
    """An axis that holds the shares of θ, 0 and 1, and whatever lies beyond."""
    low = min(-0.05, rows[["value", "low", "lowest"]].min().min() - 0.05)
    high = max(1.05, rows[["value", "high", "highest"]].max().max() + 0.05)
    return {"range": [float(low), float(high)]}


def _title(score: str) -> str:
    first, _, which = score.partition(", ")
    return f"{first.capitalize()} ({which})"


def _about(table: pd.DataFrame) -> str:
    where = about(table["task"].iloc[0], table["model"].iloc[0])
    return f"{where} · n = {table['n'].iloc[0]} {table['split'].iloc[0]} queries"


def _how(one: Reconstruction) -> str:
    s = one.settings
    rescale = {"none": "as computed", "theta": "rescaled to ‖θ‖", "validation": "rescaled"}
    return (
        f"{s.reading.capitalize()}, norm {s.norm}, attention {s.attention}, "
        f"{rescale[s.rescale]} · gain in log-probability over zero-shot · "
        "bars are 95 % intervals; of random vectors, all draws"
    )
