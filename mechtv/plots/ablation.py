"""What is left of a vector's effect without some heads, beside random sets of as many."""

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechtv.analysis.ablation import Ablation
from mechtv.errors import InvalidInput
from mechtv.evaluation.intervals import Estimate
from mechtv.plots.room import finished
from mechtv.plots.scores import FULL, Scale
from mechtv.plots.style import (
    INK,
    LOOKS,
    about,
    basis_text,
    error_bars,
    estimate_text,
    plain,
    titled,
)

WIDTH = 0.26  # of a bar; groups stand 1 apart
SPREAD = 0.08  # dots of random sets lie so far to either side
HEIGHT = 270
PATTERN = {"fillmode": "overlay", "solidity": 0.15, "size": 7}
TITLES = {
    "log-probability": "Log p(first answer token), nats",
    "logit difference": "Logit difference (logits)",
}
BARS = {
    "intact": ("No head ablated", LOOKS["learned"].color, ""),
    "given heads": ("Given heads ablated", LOOKS["hidden_state"].color, "/"),
    "random heads": ("Random heads ablated", "#b8bec6", "."),
}


def ablation(results: Ablation | Sequence[Ablation], score: str = FULL) -> go.Figure:
    """Bars of one or more ablations: intact, without the given heads, without random ones.

    Error bars are 95 % intervals over queries; those of random heads hold 95 % of the sets, each a
    dot.

    Args:
        score: a score of `Ablation.table`.

    Raises:
        InvalidInput: if there are no results, or one lacks the score.
    """
    every = [results] if isinstance(results, Ablation) else list(results)
    if not every:
        raise InvalidInput("There are no ablations to draw; give at least one.")
    scale, tables = Scale.of(score), [result.table() for result in every]
    rows = pd.concat(
        [_rows(table, score).assign(x=float(place)) for place, table in enumerate(tables)]
    )
    figure = titled(f"{scale.name} without the given heads", *_lines(every), height=HEIGHT)
    for number, condition in enumerate(BARS):
        own = rows[rows["condition"] == condition]
        if len(own):
            figure.add_trace(_bar(condition, own, scale, shift=(number - 1) * WIDTH))
    with_sets = [(place, result) for place, result in enumerate(every) if result.random]
    for place, result in with_sets:
        first = place == with_sets[0][0]
        figure.add_trace(_dots(result, score, scale, x=place + WIDTH, first=first))
    figure.update_xaxes(
        showgrid=False, tickvals=list(range(len(every))), ticktext=_names(every),
        range=(-0.6, len(every) - 0.4) if len(every) > 1 else (-1.2, 1.2),
    )  # fmt: skip
    if score.startswith("accuracy"):
        figure.update_yaxes(title_text=scale.title, **scale.axis(rows["value"]))
    else:
        figure.update_yaxes(title_text=TITLES.get(score, scale.title))
    return finished(figure)


def _rows(table: pd.DataFrame, score: str) -> pd.DataFrame:
    rows = table[table["score"] == score]
    if rows.empty:
        known = ", ".join(map(repr, table["score"].unique()))
        raise InvalidInput(f"The ablation has no score {score!r}; there are {known}.")
    return rows


def _names(results: Sequence[Ablation]) -> list[str]:
    """Task and block of each, and whatever else tells them apart."""
    more = [(result.mode, result.split, result.provenance.model) for result in results]
    apart = [len(set(column)) > 1 for column in zip(*more, strict=True)]
    names = []
    for result, fields in zip(results, more, strict=True):
        parts = [f"θ at block {result.layer}", *itertools.compress(fields, apart)]
        names.append(f"{plain(result.task)}<br>{', '.join(map(about, parts))}")
    return names


def _lines(results: Sequence[Ablation]) -> list[str]:
    def range_of(numbers: list[int]) -> str:
        low, high = min(numbers), max(numbers)
        return str(low) if low == high else f"{low}–{high}"

    def all_of(names: Iterable[str]) -> str:
        return ", ".join(sorted(set(names)))

    def one_or_count(names: Iterable[str], kind: str) -> str:
        found = set(names)
        return found.pop() if len(found) == 1 else f"{len(found)} {kind}"

    tasks = one_or_count((result.task for result in results), "tasks")
    models = one_or_count((result.provenance.model for result in results), "models")
    n = range_of([len(result.queries) for result in results])
    splits, modes = (all_of(getattr(r, name) for r in results) for name in ("split", "mode"))
    heads = range_of([len(result.heads) for result in results])
    return [
        f"{about(tasks, models)} · n = {n} {splits} queries · {modes} ablation",
        f"{heads} heads at once; bars: 95 % intervals, of random heads 95 % of the sets (dots)",
    ]


def _bar(condition: str, rows: pd.DataFrame, scale: Scale, shift: float) -> go.Bar:
    name, color, pattern = BARS[condition]
    records = rows.to_dict("records")
    estimates = [scale.estimate(row) for row in records]
    return go.Bar(
        name=name,
        x=rows["x"] + shift,
        y=[e.value for e in estimates],
        width=WIDTH * 0.92,
        error_y=error_bars(estimates) | {"color": INK, "thickness": 1, "width": 3},
        marker={"color": color, "pattern": {"shape": pattern, **PATTERN}},
        hovertext=[_hover(name, e, row, scale) for e, row in zip(estimates, records, strict=True)],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _hover(name: str, estimate: Estimate, row: Mapping[Hashable, Any], scale: Scale) -> str:
    basis, more = basis_text(estimate), ""
    if row["condition"] == "random heads":
        basis = basis_text(estimate, f"mean and 95 % range of {row['n_sets']:.0f} sets")
    elif row["condition"] == "given heads" and not pd.isna(row["p_value"]):
        more = f"<br>rank among random sets: p = {row['p_value']:.3f}"
    numbers = estimate_text(estimate, scale.digits, scale.unit)
    return f"<b>{name}</b><br>{numbers}<br>{basis}{more}"


def _dots(result: Ablation, score: str, scale: Scale, x: float, first: bool) -> go.Scatter:
    values = result.random_values(score)
    places = x + SPREAD * np.cos(2.4 * np.arange(len(values)))  # apart, and alike every time
    return go.Scatter(
        name="Random sets",
        legendgroup="sets",
        showlegend=first,
        mode="markers",
        x=places,
        y=values,
        marker={"color": INK, "size": 4, "opacity": 0.6},
        text=[str(heads).replace("), (", ")<br>(") for heads in result.random_sets],
        hovertemplate=f"%{{y:.{scale.digits}f}}<br>%{{text}}<extra></extra>",
    )
