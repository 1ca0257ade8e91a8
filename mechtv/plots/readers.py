"""Who reads theta: all 16 settings above a matrix of dots, and what each reader contributes."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechtv.analysis.readers import READERS, SETTINGS, Readers
from mechtv.errors import UnknownName
from mechtv.evaluation.intervals import Estimate
from mechtv.plots.room import finished
from mechtv.plots.style import (
    GRID,
    INK,
    LOOKS,
    MUTED,
    about,
    depth_colors,
    error_bars,
    estimate_text,
    fixed,
    hover,
    titled,
)

LOG_PROBABILITY = "log-probability"
BETTER, WORSE = LOOKS["learned"].color, LOOKS["hidden_state"].color
POINTS = {
    "alone": ("Shown to it alone", "circle", -0.22),
    "withheld": ("Hidden from it alone", "diamond", 0.22),
}
MOST_LEVEL, MOST_UPRIGHT = 2, 12  # ranges whose shares fit side by side, level and upright
HEIGHT = 340
NAMES = tuple(name[0].upper() + name[1:] for name in READERS)


def reader_settings(
    readers: Readers, score: str = LOG_PROBABILITY, *, blocks: range | None = None
) -> go.Figure:
    """A score of every set of readers that see theta: few on the left, all on the right.

    Bars begin at the plain run's score, so their lengths are gains; dots say who sees theta. Error
    bars are 95 % intervals of the score.

    Args:
        blocks: which of the measured ranges; the first if None.

    Raises:
        UnknownName: if there is no such score.
        InvalidInput: if the range was not measured.
    """
    chosen = [(some, _estimate(readers, some, score, blocks)) for some in SETTINGS]
    base = chosen[0][1].value
    chosen.sort(key=lambda pair: (len(pair[0]), pair[1].value))
    blocks = readers.blocks[0] if blocks is None else blocks
    figure = titled(
        f"{_named(score)} when only some readers see the vector",
        _where(readers, blocks),
        "Filled dots: readers that see the vector · bars begin at the plain run · 95 % intervals",
        height=470,
    )
    figure.set_subplots(
        rows=2, cols=1, shared_xaxes=True, row_heights=[0.7, 0.3], vertical_spacing=0.03
    )
    figure.add_trace(_bars([e for _, e in chosen], base, [_label(s) for s, _ in chosen]), 1, 1)
    figure.add_hline(base, line={"color": MUTED, "width": 1}, row=1, col=1)
    for trace in _dots([some for some, _ in chosen]):
        figure.add_trace(trace, 2, 1)
    ends = [end for _, e in chosen for end in (e.value, e.low, e.high)]
    low, high = np.nanmin(ends), np.nanmax(ends)
    room = 0.04 * (high - low) or 0.1
    figure.update_yaxes(title_text=_axis(score), range=[low - room, high + room], row=1, col=1)
    figure.update_xaxes(showticklabels=False, showgrid=False, ticks="")
    ticks = {"tickvals": list(range(len(READERS))), "ticktext": NAMES}
    figure.update_yaxes(**ticks, range=[len(READERS) - 0.5, -0.5], showgrid=False, row=2, col=1)
    figure.update_layout(margin={"l": 140}, bargap=0.3, showlegend=False)
    return finished(figure)


def reader_shares(readers: Readers, score: str = LOG_PROBABILITY) -> go.Figure:
    """What each reader contributes to the gain in a score: its Shapley value, share and interval.

    Above each bar stands its share of the gain, with its 95 % interval. Beside the bars: the gain
    when theta is shown to this reader alone, and the loss when it is hidden from it alone. Several
    ranges of blocks stand side by side, each with the gain that it makes by itself. The shares of
    very many ranges, which no longer fit, are at the pointer only.

    Raises:
        UnknownName: if there is no such score.
    """
    table = readers.effects(score)
    labels = table["blocks"].unique().tolist()
    written = len(labels) <= MOST_UPRIGHT
    figure = titled(
        f"What each reader contributes: {_named(score).lower()}",
        _where(readers, *readers.blocks),
        f"Bars: Shapley values{', with their share of the gain above' if written else ''} · "
        "95 % intervals over queries",
        height=HEIGHT,
    )
    width = 0.72 / len(labels)
    colors = [BETTER] if len(labels) == 1 else depth_colors(len(labels))
    for place, (label, color) in enumerate(zip(labels, colors, strict=True)):
        at = np.arange(len(READERS)) + width * (place - (len(labels) - 1) / 2)
        own = table[table["blocks"] == label]
        name = f"Shapley value, blocks {label.replace('-', '–')}"
        rows = own[own["effect"] == "Shapley value"].to_dict("records")
        figure.add_trace(_value_bars(rows, at, width, name, color))
        if written:
            _write_shares(figure, rows, at, n_ranges=len(labels))
        for effect, (meaning, symbol, shift) in POINTS.items():
            beside = at + shift * width
            size = max(5.0, min(10.0, 40 / len(labels)))
            points = _points(own[own["effect"] == effect], beside, meaning, symbol, size)
            figure.add_trace(points.update(showlegend=place == 0))
    figure.add_hline(0, line={"color": MUTED, "width": 1})
    figure.update_xaxes(tickvals=list(range(len(READERS))), ticktext=NAMES, showgrid=False)
    figure.update_yaxes(
        title_text=f"Gain in {_axis(score).lower()}", range=_range(table, len(labels))
    )
    return finished(figure)


# --- the settings --------------------------------------------------------------------------------


def _estimate(
    readers: Readers, shown: tuple[Any, ...], score: str, blocks: range | None
) -> Estimate:
    estimates = readers.of(*shown, blocks=blocks).estimates()
    if score not in estimates:
        raise UnknownName("score", score, estimates)
    return estimates[score]


def _bars(estimates: Sequence[Estimate], base: float, labels: Sequence[str]) -> go.Bar:
    return go.Bar(
        x=list(range(len(estimates))),
        y=[e.value - base for e in estimates],
        base=base,
        error_y=error_bars(estimates) | {"color": INK, "thickness": 1.2, "width": 4},
        marker={"color": [BETTER if e.value >= base else WORSE for e in estimates]},
        hovertext=[hover(label, e) for label, e in zip(labels, estimates, strict=True)],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _dots(settings: Sequence[tuple[Any, ...]]) -> list[go.Scatter]:
    """A line through the readers of each setting, and a dot for every reader."""
    lines: list[tuple[int | None, int | None]] = []
    for x, some in enumerate(settings):
        rows = [READERS.index(name) for name in some]
        lines += [(x, min(rows)), (x, max(rows)), (None, None)] if rows else []
    dots = [(x, y) for x in range(len(settings)) for y in range(len(READERS))]
    shown = [READERS[y] in settings[x] for x, y in dots]
    line = go.Scatter(
        x=[x for x, _ in lines],
        y=[y for _, y in lines],
        mode="lines",
        line={"color": INK, "width": 2},
        hoverinfo="skip",
    )
    dot = go.Scatter(
        x=[x for x, _ in dots],
        y=[y for _, y in dots],
        mode="markers",
        marker={"size": 12, "color": [INK if yes else GRID for yes in shown]},
        hovertext=[
            f"<b>{_label(settings[x])}</b><br>{NAMES[y]}: {'see' if yes else 'do not see'} it"
            for (x, y), yes in zip(dots, shown, strict=True)
        ],
        hovertemplate="%{hovertext}<extra></extra>",
    )
    return [line, dot]


def _label(shown: Sequence[str]) -> str:
    return " + ".join(shown) or "none"


# --- the shares ----------------------------------------------------------------------------------


def _value_bars(
    rows: Sequence[Mapping[Hashable, Any]],
    at: np.ndarray,
    width: float,
    name: str,
    color: str,
) -> go.Bar:
    estimates = [_of(row) for row in rows]
    return go.Bar(
        name=name,
        x=at.tolist(),
        y=[e.value for e in estimates],
        width=0.86 * width,
        error_y=error_bars(estimates) | {"color": INK, "thickness": 1.2, "width": 4},
        marker={"color": color},
        hovertext=[
            f"{hover(row['reader'] + ': ' + name, e)}<br>share of the gain: {_share_text(row)}"
            for row, e in zip(rows, estimates, strict=True)
        ],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _write_shares(
    figure: go.Figure,
    rows: Sequence[Mapping[Hashable, Any]],
    at: np.ndarray,
    *,
    n_ranges: int,
) -> None:
    """Each bar's share, at the top of the panel, where no bar or point can hide it."""
    angle = 0 if n_ranges <= MOST_LEVEL else -90
    for row, x in zip(rows, at.tolist(), strict=True):
        text = _share_text(row, with_interval=n_ranges == 1)
        place = {"x": x, "y": 1, "yref": "paper", "yanchor": "top", "showarrow": False}
        figure.add_annotation(
            **place, text=text, textangle=angle, font={"size": 13}, bgcolor="white"
        )


def _points(
    rows: pd.DataFrame, at: np.ndarray, meaning: str, symbol: str, size: float
) -> go.Scatter:
    records = rows.to_dict("records")
    fill, line = ("white", INK) if symbol == "circle" else (INK, "white")  # seen on any bar
    return go.Scatter(
        name=meaning,
        legendgroup=meaning,
        legendrank=2000,  # behind the bars
        x=at.tolist(),
        y=[row["value"] for row in records],
        mode="markers",
        marker={
            "symbol": symbol,
            "size": size,
            "color": fill,
            "line": {"width": 1.6, "color": line},
        },
        hovertext=[hover(f"{row['reader']}: {meaning.lower()}", _of(row)) for row in records],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _of(row: Mapping[Hashable, Any]) -> Estimate:
    return Estimate(value=row["value"], low=row["low"], high=row["high"], n=row["n"])


def _share_text(row: Mapping[Hashable, Any], *, with_interval: bool = True) -> str:
    value, low, high = (100 * row[end] for end in ("share", "share_low", "share_high"))
    if np.isnan(value):
        return "no gain"
    share = Estimate(value=value, low=low, high=high, n=row["n"])
    return f"{estimate_text(share, 0) if with_interval else fixed(value, 0)} %"


def _range(table: pd.DataFrame, n_ranges: int) -> list[float]:
    """From below the lowest end to well above the highest, where the shares are written."""
    drawn = table[table["effect"] != "Shapley interaction"]
    ends = drawn[["value", "low", "high"]].to_numpy()
    low, high = min(0.0, float(np.nanmin(ends))), max(0.0, float(np.nanmax(ends)))
    size = (high - low) or 1.0
    room = 0.14 if n_ranges <= MOST_LEVEL else 0.22
    return [low - 0.05 * size, high + room * size]


# --- words ---------------------------------------------------------------------------------------


def _named(score: str) -> str:
    first, _, rest = score.partition(", ")
    return first[:1].upper() + first[1:] + (f" ({rest})" if rest else "")


def _axis(score: str) -> str:
    return f"{_named(score)} (nats)" if score == LOG_PROBABILITY else _named(score)


def _where(readers: Readers, *blocks: range) -> str:
    spans = ", ".join(f"{b[0]}–{b[-1]}" if len(b) > 1 else str(b[0]) for b in blocks)
    where = f"blocks {spans}" if len(blocks) <= MOST_LEVEL else f"{len(blocks)} ranges of blocks"
    n = len(readers.answers[0][0].correct)
    names = about(readers.task, readers.provenance.model)
    return f"{names} · vector at layer {readers.layer}, seen in {where} · n = {n} queries"
