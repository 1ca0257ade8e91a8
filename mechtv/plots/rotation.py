"""How maps turn and stretch their vectors, by layer, and their singular values."""

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from mechtv.analysis.polar import COSINE_Q, STRETCH
from mechtv.analysis.rotation import RotationStretch, Turn
from mechtv.errors import InvalidInput
from mechtv.plots.room import finished
from mechtv.plots.style import (
    DEPTH_SYMBOLS,
    MUTED,
    Look,
    about,
    channels,
    depth_colors,
    fixed,
    look_of,
    plain,
    titled,
)

MEASURES = {COSINE_Q: "Turn: cos(θ, Qθ)", STRETCH: "Stretch: ‖Wθ‖ / ‖θ‖"}
LOOKS = {
    "fitted": Look(label="Fitted map", color=look_of("learned").color),
    "integrated": Look(
        label="Integrated Jacobian",
        color=look_of("hidden_state").color,
        symbol="square",
        dash="dash",
    ),
}
PANEL, GAP = 300, 70  # pixels
BAND = 0.16


def rotation_by_layer(result: RotationStretch) -> go.Figure:
    """cos(θ, Qθ) and ‖Wθ‖ / ‖θ‖ by layer, a row a task, with those of random vectors as bands.

    Open markers: Q also reflects, or is not unique (the text at the pointer says which).

    Raises:
        InvalidInput: if there are no maps, or two of one kind, task and layer.
    """
    turns = _checked(result)
    tasks = list(dict.fromkeys(turn.task for turn in turns))
    height = len(tasks) * PANEL + (len(tasks) - 1) * GAP
    figure = titled(
        "How the model turns and stretches a vector",
        f"{_about(turns)} · polar decomposition W = QΣ",
        f"Bands and lines: n = {_n_null(turns)} random vectors of θ's norm, mean and central 95 %"
        f"{_open(turns)}",
        height=height,
    )
    figure.set_subplots(
        rows=len(tasks),
        cols=2,
        subplot_titles=[
            f"{title}{f' · {plain(task)}' if len(tasks) > 1 else ''}"
            for task in tasks
            for title in MEASURES.values()
        ],
        horizontal_spacing=0.13,
        vertical_spacing=GAP / height if len(tasks) > 1 else 0,
    )
    figure.update_annotations(font_size=14)
    for row, task in enumerate(tasks, start=1):
        for column, measure in enumerate(MEASURES, start=1):
            for name in dict.fromkeys(turn.name for turn in turns if turn.task == task):
                own = [turn for turn in turns if (turn.task, turn.name) == (task, name)]
                own.sort(key=lambda turn: turn.layer)
                figure.add_traces(_traces(name, measure, own), rows=row, cols=column)
    figure.update_xaxes(title_text="Layer at whose input θ is added", row=len(tasks))
    if len(layers := sorted({turn.layer for turn in turns})) <= 8:
        figure.update_xaxes(tickvals=layers)
    figure.update_yaxes(title_text="Cosine", rangemode="tozero", matches="y", col=1)
    figure.update_yaxes(title_text="Ratio of norms", rangemode="tozero", matches="y2", col=2)
    return finished(figure)


def singular_spectrum(result: RotationStretch) -> go.Figure:
    """The singular values of each map, the largest first, on a logarithmic axis.

    Raises:
        InvalidInput: if there are no maps, or two of one kind, task and layer.
    """
    turns = _checked(result)
    figure = titled(
        "Singular values of the maps",
        _about(turns),
        "1 (dotted) keeps a direction's length; in brackets the effective rank, exp of the entropy",
        height=PANEL + 80,
    )
    layers = sorted({turn.layer for turn in turns})
    colors = dict(zip(layers, depth_colors(len(layers)), strict=True))
    for turn in sorted(turns, key=lambda turn: turn.layer):
        figure.add_trace(_spectrum(turn, colors[turn.layer], turns))
    figure.add_hline(y=1, line={"color": MUTED, "width": 1, "dash": "dot"})
    figure.update_xaxes(title_text="Singular value, by rank", rangemode="tozero")
    top = max(float(turn.polar.singular_values[0]) for turn in turns)
    low = min(float(np.quantile(turn.polar.singular_values, 0.02)) for turn in turns)
    ends = [np.log10(max(low, top * 1e-6) / 2), np.log10(2 * top)]
    figure.update_yaxes(title_text="Singular value (logarithmic)", type="log", dtick=1, range=ends)
    return finished(figure)


def _traces(name: str, measure: str, turns: Sequence[Turn]) -> list[go.Scatter]:
    look = LOOKS.get(name, look_of(name))
    layers = [turn.layer for turn in turns]
    middle, low, high = zip(*(turn.null_range(measure) for turn in turns), strict=True)
    red, green, blue = channels(look.color)
    quiet = {"legendgroup": name, "showlegend": False, "hoverinfo": "skip"}
    shape = f"{look.symbol}-open"
    return [
        go.Scatter(
            x=[*layers, *layers[::-1]],
            y=[*high, *low[::-1]],
            mode="lines",
            line={"color": look.color, "width": 1},
            fill="toself",
            fillcolor=f"rgba({red},{green},{blue},{BAND})",
            opacity=0.6,
            **quiet,
        ),
        go.Scatter(
            x=layers,
            y=middle,
            mode="lines" if len(layers) > 1 else "markers",
            marker={"symbol": "line-ew-open", "size": 24, "color": look.color},
            line={"color": look.color, "width": 1, "dash": look.dash},
            **quiet,
        ),
        go.Scatter(
            name=plain(look.label),
            legendgroup=name,
            x=layers,
            y=[turn.values[measure] for turn in turns],
            mode="lines+markers",
            line={"color": look.color, "dash": look.dash, "width": 2.5},
            marker={
                "symbol": [look.symbol if t.polar.kind == "rotation" else shape for t in turns],
                "size": 10,
            },
            hovertext=[_hover(turn, measure, look) for turn in turns],
            hovertemplate="%{hovertext}<extra></extra>",
        ),
    ]


def _spectrum(turn: Turn, color: str, turns: Sequence[Turn]) -> go.Scatter:
    layers = sorted({other.layer for other in turns})
    names = [f"layer {turn.layer}"]
    names += [turn.task] if len({t.task for t in turns}) > 1 else []
    names += [LOOKS.get(turn.name, look_of(turn.name)).label] if len(_kinds(turns)) > 1 else []
    label = f"{', '.join(names)} ({turn.polar.entropy_rank:.0f})"
    values = turn.polar.singular_values.numpy()
    rank = np.arange(1, len(values) + 1)
    return go.Scatter(
        name=plain(label[:1].upper() + label[1:]),
        legendgroup=label,
        x=rank,
        y=values,
        mode="lines+markers",
        line={"color": color, "width": 2, "dash": LOOKS.get(turn.name, look_of(turn.name)).dash},
        marker={
            "symbol": DEPTH_SYMBOLS[layers.index(turn.layer) % len(DEPTH_SYMBOLS)],
            "size": [8 if i % max(1, len(values) // 8) == 0 else 0 for i in range(len(values))],
        },
        hovertext=[
            f"<b>{plain(label)}</b><br>singular value {i}: {value:.3g}"
            for i, value in zip(rank, values, strict=True)
        ],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _hover(turn: Turn, measure: str, look: Look) -> str:
    middle, low, high = turn.null_range(measure)
    return (
        f"<b>{plain(look.label)}, layer {turn.layer}</b><br>{measure} = "
        f"{fixed(turn.values[measure], 3)}<br>random vectors {fixed(middle, 3)} "
        f"[{fixed(low, 3)}, {fixed(high, 3)}], n = {len(turn.null[measure])}<br>"
        f"Q: {turn.polar.kind}"
    )


def _checked(result: RotationStretch) -> list[Turn]:
    if not result.turns:
        raise InvalidInput("There are no maps to draw; give at least one.")
    places = [(turn.name, turn.task, turn.layer) for turn in result.turns]
    twice = next((place for place in places if places.count(place) > 1), None)
    if twice:
        raise InvalidInput(
            f"The {twice[0]} map of {twice[1]!r} at layer {twice[2]} is there twice; draw each "
            "in a figure of its own."
        )
    return list(result.turns)


def _about(turns: Sequence[Turn]) -> str:
    tasks = list(dict.fromkeys(turn.task for turn in turns))
    models = list(dict.fromkeys(turn.provenance.model for turn in turns))
    return about(*(tasks if len(tasks) <= 2 else (f"{len(tasks)} tasks",)), *models)


def _kinds(turns: Sequence[Turn]) -> set[str]:
    return {turn.name for turn in turns}


def _n_null(turns: Sequence[Turn]) -> str:
    numbers = sorted({len(turn.null[COSINE_Q]) for turn in turns})
    return "–".join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))


def _open(turns: Sequence[Turn]) -> str:
    if all(turn.polar.kind == "rotation" for turn in turns):
        return ""
    return "<br>Open markers: Q also reflects, or is not unique"
