"""Any tidy table as lines, bars or a heat map: one row a point, with `value`, `low`, `high`, `n`.

For results that have no figure of their own, such as those of several tasks, layers or seeds at
once. Columns `low`, `high` (the ends of intervals) and `n` may be missing.
"""

import textwrap
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechtv.errors import InvalidInput
from mechtv.evaluation.intervals import Estimate
from mechtv.plots.panels import BESIDE, panels
from mechtv.plots.reference import reference_traces
from mechtv.plots.room import NARROW, finished
from mechtv.plots.style import INK, LOOKS, Look, error_bars, estimate_text, hover, plain, titled

COLUMNS, MOST_TICKS = 3, 8
LEAST_HEIGHT = 180  # pixels of a heat map
WITH_TICKS = 0.075  # of the width, between panels with axes of their own
EDGE = 0.05  # of an axis, beyond the farthest value
MARGINS, LEAST_TICK, TICK_CHARACTER = 100, 6, 7.5  # pixels, characters, pixels of each
CYCLE = [look for name, look in LOOKS.items() if name != "linear"]  # yellow is for lines alone


@dataclass(frozen=True, kw_only=True)
class Labels:
    """What a figure says beside its numbers.

    Args:
        lines: of the subtitle.
        x, y: the axes' titles, with units.
        names: of series and panels, where they are not the table's own values; a panel's may have
            several lines.
        unit: follows values at the pointer.
    """

    title: str
    x: str = ""
    y: str = ""
    lines: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    unit: str = ""

    def of(self, value: object) -> str:
        """A value's name in front of people."""
        return self.names.get(str(value), str(value))


def tidy_lines(
    table: pd.DataFrame,
    labels: Labels,
    *,
    x: str,
    by: str,
    panel: str | None = None,
    log: bool = False,
    share: bool = False,
    columns: int = COLUMNS,
    own_y: bool = False,
) -> go.Figure:
    """A line for each value of `by` over `x`, a panel for each value of `panel`.

    Numbers are in rising order, names in the table's. Rows without an `x` are horizontal lines.
    Error bars and bands are from `low` to `high`.

    Args:
        log: a logarithmic y axis.
        share: the y axis runs from 0 to 1.
        columns: how many panels stand side by side, at most.
        own_y: each panel has a y axis of its own, since they show different quantities.

    Raises:
        InvalidInput: if the table lacks a column, has no rows, or has nothing to show on a
            logarithmic axis.
    """
    figure, places = _panels(table, labels, panel, (x, by), columns, own_y)
    looks = looks_of(table[by].unique().tolist(), labels)
    ends = _ends(table[x])
    for (row, col), (_, own) in zip(places, _groups(table, panel), strict=True):
        for name, part in own.groupby(by, sort=False):
            for trace in _line(str(name), looks[str(name)], part, x, ends, labels.unit):
                figure.add_trace(trace, row=row, col=col)
    figure.update_xaxes(_x_axis(table[x], ends))
    figure.update_yaxes(_y_axis(table, log=log, share=share, own=own_y))
    return finished(figure)


def tidy_bars(
    table: pd.DataFrame,
    labels: Labels,
    *,
    x: str,
    by: str,
    panel: str | None = None,
    log: bool = False,
    share: bool = False,
    columns: int = COLUMNS,
    own_y: bool = False,
) -> go.Figure:
    """Groups of bars: a group for each value of `x`, a bar for each value of `by`.

    Args:
        panel, log, share, columns, own_y: as in `tidy_lines`; on a logarithmic axis there are
            points, since bars have no zero to begin at.

    Raises:
        InvalidInput: if the table lacks a column, has no rows, or has nothing to show on a
            logarithmic axis.
    """
    figure, places = _panels(table, labels, panel, (x, by), columns, own_y)
    looks = looks_of(table[by].unique().tolist(), labels)
    groups = [str(value) for value in table[x].unique()]
    n = len(looks)
    for (row, col), (_, own) in zip(places, _groups(table, panel), strict=True):
        for number, (name, look) in enumerate(looks.items()):
            part = own[own[by].astype(str) == name]
            at = [groups.index(str(value)) for value in part[x]]
            offset = (number - (n - 1) / 2) * 0.8 / n
            trace = _points(name, look, part, [a + offset for a in at], labels.unit, x)
            if not log:
                trace = _bar(trace, look, 0.8 / n)
            if len(part):
                figure.add_trace(trace, row=row, col=col)
    widest = _widest_tick(len(groups), max(col for _, col in places))
    ticks = [_broken(plain(labels.of(group)), widest) for group in groups]
    figure.update_xaxes(
        range=(-0.5, len(groups) - 0.5),
        tickvals=list(range(len(groups))),
        ticktext=ticks,
        tickangle=0,
        showgrid=False,
    )
    figure.update_yaxes(_y_axis(table, log=log, share=share, own=own_y))
    return finished(figure, tick_lines=1 + max(tick.count("<br>") for tick in ticks))


def tidy_heat(
    table: pd.DataFrame,
    labels: Labels,
    *,
    x: str,
    y: str,
    middle: float | None = None,
    digits: int = 2,
) -> go.Figure:
    """A cell for each pair of `x` and `y`, its value written in it.

    Args:
        middle: the value that is white, on a scale of two hues; one hue from light to dark if None.

    Raises:
        InvalidInput: if the table lacks a column, has no rows, or has a pair twice.
    """
    _check(table, (x, y))
    if table.duplicated([x, y]).any():
        raise InvalidInput(f"The table has a pair of {x} and {y} twice; choose the rows first.")
    columns, rows = table[x].unique().tolist(), table[y].unique().tolist()
    wide = table.pivot(index=y, columns=x, values="value").reindex(index=rows, columns=columns)
    hovers = {
        (r[y], r[x]): _hover(f"{labels.of(r[y])} → {labels.of(r[x])}", r, labels.unit)
        for r in table.to_dict("records")
    }
    figure = titled(labels.title, *labels.lines, height=max(LEAST_HEIGHT, 46 * len(rows)))
    figure.add_trace(
        go.Heatmap(
            z=wide.to_numpy(),
            x=[labels.of(column) for column in columns],
            y=[labels.of(row) for row in rows],
            text=[[_number(v, digits) for v in line] for line in wide.to_numpy()],
            texttemplate="%{text}",
            customdata=[[hovers.get((row, column), "") for column in columns] for row in rows],
            hovertemplate="%{customdata}<extra></extra>",
            colorscale="Blues" if middle is None else "RdBu_r",
            zmid=middle,
            colorbar={"title": {"text": labels.y, "side": "right"}, "thickness": 14},
            xgap=2,
            ygap=2,
        )
    )
    figure.update_xaxes(title_text=labels.x, showgrid=False, ticks="", tickangle=0)
    figure.update_yaxes(autorange="reversed", showgrid=False, ticks="", automargin=True)
    return finished(figure)


def looks_of(names: Sequence[Any], labels: Labels) -> dict[str, Look]:
    """A look for each series: a method's own, else the next that is free."""
    texts = [str(name) for name in names]
    free = [look for look in CYCLE if look not in [LOOKS.get(text) for text in texts]]
    found: dict[str, Look] = {}
    for text in texts:
        look = LOOKS.get(text) or free.pop(0)
        found[text] = _called(
            look, labels.names.get(text, LOOKS[text].label if text in LOOKS else text)
        )
        if not free:
            free = list(CYCLE)
    return found


def _called(look: Look, label: str) -> Look:
    return Look(
        label=label, color=look.color, symbol=look.symbol, dash=look.dash, pattern=look.pattern
    )


def _panels(
    table: pd.DataFrame,
    labels: Labels,
    panel: str | None,
    needed: Sequence[str],
    columns: int,
    own_y: bool,
) -> tuple[go.Figure, list[tuple[int, int]]]:
    _check(table, [*needed, *([panel] if panel else [])])
    names = [labels.of(value) for value in table[panel].unique()] if panel else [""]
    return panels(
        labels.title,
        labels.lines,
        names,
        columns=columns,
        titles=(labels.x, labels.y),
        beside=WITH_TICKS if own_y else BESIDE,
    )


def _check(table: pd.DataFrame, columns: Sequence[str]) -> None:
    missing = [name for name in (*columns, "value") if name not in table]
    if missing:
        raise InvalidInput(
            f"The table has no column {missing[0]!r}; it has {', '.join(map(str, table.columns))}."
        )
    if table.empty:
        raise InvalidInput("The table has no rows; nothing can be drawn.")


def _groups(table: pd.DataFrame, panel: str | None) -> list[tuple[Any, pd.DataFrame]]:
    return list(table.groupby(panel, sort=False)) if panel else [("", table)]


def _estimate(row: Mapping[Hashable, Any]) -> Estimate:
    low, high = (row.get(name, np.nan) for name in ("low", "high"))
    n = row.get("n", 0)
    return Estimate(
        value=row["value"],
        low=np.nan if low is None else low,
        high=np.nan if high is None else high,
        n=int(n) if n == n and n is not None else 0,
    )


def _line(
    name: str, look: Look, rows: pd.DataFrame, x: str, ends: tuple[float, float], unit: str
) -> list[go.Scatter]:
    if rows[x].isna().all():
        across = (ends[0], sum(ends) / 2, ends[1])
        return list(
            reference_traces(name, look.label, _estimate(rows.to_dict("records")[0]), across, unit)
        )
    if pd.api.types.is_numeric_dtype(rows[x]):
        rows = rows.sort_values(x, kind="stable")
    trace = _points(name, look, rows, rows[x].tolist(), unit, x)
    if len(rows) > 1:
        trace.update(
            mode="lines+markers", line={"color": look.color, "dash": look.dash, "width": 2}
        )
    return [trace]


def _points(
    name: str, look: Look, rows: pd.DataFrame, at: Sequence[Any], unit: str, x: str
) -> go.Scatter:
    records = rows.to_dict("records")
    estimates = [_estimate(row) for row in records]
    return go.Scatter(
        name=plain(look.label),
        legendgroup=name,
        x=list(at),
        y=[estimate.value for estimate in estimates],
        error_y=error_bars(estimates) | {"color": INK, "thickness": 1, "width": 3},
        mode="markers",
        marker={"symbol": look.symbol, "color": look.color, "size": 8, "line": {"width": 0.5}},
        hovertext=[_hover(f"{look.label}, {_place(x, row[x])}", row, unit) for row in records],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _widest_tick(n_groups: int, n_columns: int) -> int:
    """How many characters fit below a group of bars in the narrowest figure."""
    return max(LEAST_TICK, int((NARROW - MARGINS) / n_columns / n_groups / TICK_CHARACTER))


def _broken(text: str, widest: int) -> str:
    return "<br>".join(textwrap.wrap(text, widest, break_long_words=False, break_on_hyphens=False))


def _bar(points: go.Scatter, look: Look, width: float) -> go.Bar:
    pattern = {"shape": look.pattern, "fillmode": "overlay", "solidity": 0.15, "size": 7}
    return go.Bar(
        name=points.name,
        legendgroup=points.legendgroup,
        x=points.x,
        y=points.y,
        width=width,
        error_y=points.error_y.to_plotly_json(),
        marker={"color": look.color, "pattern": pattern},
        hovertext=points.hovertext,
        hovertemplate=points.hovertemplate,
    )


def _hover(label: str, row: Mapping[Hashable, Any], unit: str) -> str:
    estimate = _estimate(row)
    if estimate.n:
        return hover(label, estimate, unit)
    return f"<b>{plain(label)}</b><br>{estimate_text(estimate, 3, unit)}"


def _place(column: str, value: object) -> str:
    """Such as "layer 8", or the value alone where it is a name."""
    return str(value) if isinstance(value, str) else f"{column.replace('_', ' ')} {value}"


def _ends(x: pd.Series) -> tuple[float, float]:
    if not pd.api.types.is_numeric_dtype(x):
        return -0.5, x.nunique() - 0.5
    low, high = float(x.min()), float(x.max())
    edge = max(0.5, (high - low) / 25)
    return low - edge, high + edge


def _x_axis(x: pd.Series, ends: tuple[float, float]) -> dict[str, Any]:
    """Names in their order; of numbers, those that there are, if they are few."""
    if not pd.api.types.is_numeric_dtype(x):
        return {"type": "category"}
    values = sorted(x.dropna().unique().tolist())
    apart = min(np.diff(values), default=1) > (ends[1] - ends[0]) / MOST_TICKS / 2
    return {"range": ends, "tickvals": values if len(values) <= MOST_TICKS and apart else None}


def _y_axis(table: pd.DataFrame, *, log: bool, share: bool, own: bool) -> dict[str, Any]:
    """Panels that share an axis get a range: Plotly finds none for them in several rows."""
    apart = {"matches": None, "showticklabels": True} if own else {}
    if share:
        return {"range": [-0.03, 1.03], "dtick": 0.2} | apart
    kind = {"type": "log"} if log else {"zeroline": True, "zerolinecolor": INK}
    return kind | (apart if own else {"range": _range(table, log=log)})


def _range(table: pd.DataFrame, *, log: bool) -> list[float]:
    """The ends of an axis with room for all values and intervals, and for 0 if it has one."""
    columns = [name for name in ("value", "low", "high") if name in table]
    ends = table[columns].to_numpy(float).ravel()
    ends = np.log10(ends[ends > 0]) if log else np.append(ends, 0.0)
    if not ends.size:
        raise InvalidInput("No value is above 0, so a logarithmic axis shows none; set log=False.")
    low, high = np.nanmin(ends), np.nanmax(ends)
    edge = EDGE * (high - low) or 1.0
    return [
        float(low - edge) if log or low < 0 else 0.0,
        float(high + edge) if log or high > 0 or high == low else 0.0,
    ]


def _number(value: float, digits: int) -> str:
    return "" if value != value else f"{value:.{digits}f}".replace("-", "−")
