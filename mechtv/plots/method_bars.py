"""All methods as bars: each at its best layer, or each place where a vector is put."""

import textwrap
from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go

from mechtv.errors import InvalidInput
from mechtv.plots.panels import evenly, panels
from mechtv.plots.reference import reference_traces
from mechtv.plots.room import finished
from mechtv.plots.scores import FULL, Scale, about_rows, by_method, hovers, lines_without
from mechtv.plots.style import INK, error_bars, identity, look_of, plain
from mechtv.study import MethodComparison
from mechtv.study.correlation import rows_with
from mechtv.study.scoring import REFERENCES

GROUPS = 6  # groups of bars side by side
WIDEST = 12  # characters of a tick's line


def methods_table_bars(comparison: MethodComparison, score: str = FULL) -> go.Figure:
    """A score of each method at its best layer, chosen on the validation split, by task.

    Error bars and bands are 95 % intervals; zero-shot and in context are lines across a task's
    bars.

    Args:
        score: as in `accuracy_of_methods`.

    Raises:
        InvalidInput: if no task has the score.
    """
    table, scale = comparison.table(), Scale.of(score)
    rows = scale.shown(rows_with(comparison.best(), score))
    return _bars(
        f"{scale.name} at the best layer of each method",
        [
            about_rows(rows),
            f"Layers are chosen on the validation split; 95 % intervals{scale.note}",
            *lines_without(table, rows),
        ],
        rows.assign(group=rows["task"]),
        scale,
        table,
    )


def flexibility_bars(table: pd.DataFrame, score: str = FULL) -> go.Figure:
    """A score of each method at each place where its vector is put, beside the plain model.

    Args:
        table: what `flexibility` returns.
        score: any of its scores.

    Raises:
        InvalidInput: if the table has no such score, or several tasks.
    """
    rows = rows_with(table.assign(split="test", layer=table["place"]), score)
    scale = Scale.of(score)
    tasks = rows["task"].unique().tolist()
    if len(tasks) > 1:
        raise InvalidInput(f"The table has the tasks {', '.join(tasks)}; draw one at a time.")
    is_line = rows["method"].isin(REFERENCES)
    bars = rows[~is_line]
    places = bars[["place"]].drop_duplicates()
    lines = rows[is_line].drop(columns="place").merge(places, how="cross")  # across every place
    return _bars(
        f"{scale.name} by the place of the vector",
        [about_rows(rows), "Error bars and bands: 95 % intervals"],
        pd.concat([bars, lines]).assign(layer=None).rename(columns={"place": "group"}),
        scale,
        table,
    )


def _bars(
    title: str, lines: Sequence[str], rows: pd.DataFrame, scale: Scale, table: pd.DataFrame
) -> go.Figure:
    """Grouped bars, the groups in as many even rows as they need."""
    groups = rows["group"].unique().tolist()
    n_rows, width = evenly(len(groups), GROUPS)
    figure, places = panels(title, lines, [""] * n_rows, columns=1, titles=("", scale.title))
    for (place, _), start in zip(places, range(0, len(groups), width), strict=True):
        shown = groups[start : start + width]
        for name, label, own in by_method(rows[rows["group"].isin(shown)], table):
            at = own["group"].map(shown.index).tolist()
            for trace in _bar(name, label, own, scale, at):
                figure.add_trace(trace, row=place, col=1)
        ticks = {"tickvals": list(range(len(shown))), "ticktext": list(map(_wrapped, shown))}
        figure.update_xaxes(range=(-0.5, width - 0.5), **ticks, row=place, col=1)
    figure.update_layout(barmode="group", bargap=0.16, bargroupgap=0.06)
    figure.update_xaxes(showgrid=False, tickangle=0)
    figure.update_yaxes(scale.axis(rows["value"], rows["low"], rows["high"]))
    return finished(figure, tick_lines=max(_wrapped(group).count("<br>") + 1 for group in groups))


def _wrapped(text: str) -> str:
    return "<br>".join(map(plain, textwrap.wrap(text, WIDEST)))


def _bar(
    name: str, label: str, rows: pd.DataFrame, scale: Scale, at: Sequence[int]
) -> list[go.Bar | go.Scatter]:
    estimates = [scale.estimate(row) for row in rows.to_dict("records")]
    if name in REFERENCES:
        across = [
            reference_traces(name, label, estimate, (x - 0.45, float(x), x + 0.45), scale.unit)
            for x, estimate in zip(at, estimates, strict=True)
        ]
        return [trace for traces in across for trace in traces]
    look = look_of(name)
    pattern = {"shape": look.pattern, "fillmode": "overlay", "solidity": 0.15, "size": 7}
    bar = go.Bar(
        **identity(name, label),
        offsetgroup=name,
        x=list(at),
        y=[estimate.value for estimate in estimates],
        error_y=error_bars(estimates) | {"color": INK, "thickness": 1, "width": 3},
        marker={"color": look.color, "pattern": pattern},
        hovertext=hovers(label, rows, scale),
        hovertemplate="%{hovertext}<extra></extra>",
    )
    return [bar]
