"""Does a vector nearer to in-context answer better? Accuracy against dNTP, all methods at once."""

from collections.abc import Hashable
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from mechtv.evaluation.dntp import Over
from mechtv.evaluation.intervals import Estimate
from mechtv.plots.panels import ONE
from mechtv.plots.room import finished
from mechtv.plots.scores import Scale, about_rows, at_layer, by_method, marker
from mechtv.plots.style import estimate_text, identity, plain, titled
from mechtv.study import MethodComparison
from mechtv.study.correlation import ALL_TASKS, dntp_accuracy_correlation, dntp_and_accuracy


def dntp_against_accuracy(
    comparison: MethodComparison, over: Over = "labels", score: str | None = None
) -> go.Figure:
    """Accuracy against dNTP: a point a (task, method, layer), zero-shot among them.

    In context, whose dNTP is 0, is left out; the correlations are over vectors only.

    Args:
        over, score: as in `dntp_accuracy_correlation`.

    Raises:
        InvalidInput: as `dntp_accuracy_correlation` does.
    """
    points = dntp_and_accuracy(comparison, over, score)
    points = points[points["dntp"] > 0]
    found = dntp_accuracy_correlation(comparison, over, score)
    x = Scale.of(f"dNTP over {over}")
    y = Scale.of(score or "accuracy")
    figure = titled(
        f"{y.name} against {x.name}",
        about_rows(comparison.table()),
        _correlation_text(found),
        *(
            []
            if score
            else ["Accuracy: label-restricted where a task has labels, else full vocabulary"]
        ),
        height=ONE,
    )
    for name, label, own in by_method(points, comparison.table()):
        figure.add_trace(_cloud(name, label, own, x, y))
    figure.update_xaxes(title_text=x.title, **x.axis(points["dntp"]))
    figure.update_yaxes(title_text=y.title, **y.axis(points["accuracy"]))
    return finished(figure)


def _cloud(name: str, label: str, points: pd.DataFrame, x: Scale, y: Scale) -> go.Scatter:
    texts = [
        f"<b>{plain(label)}{at_layer(p['layer'])}</b><br>{plain(p['task'])}<br>"
        f"dNTP {_number(p, 'dntp', x)}<br>{plain(p['score'])} {_number(p, 'accuracy', y)}<br>"
        f"95 % intervals, n = {p['n']}"
        for p in points.to_dict("records")
    ]
    return go.Scatter(
        **identity(name, label),
        x=points["dntp"].tolist(),
        y=points["accuracy"].tolist(),
        mode="markers",
        marker=marker(name, 9),
        hovertext=texts,
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _number(point: dict[Hashable, Any], what: str, scale: Scale) -> str:
    low, high = point[f"low_{what}"], point[f"high_{what}"]
    estimate = Estimate(value=point[what], low=low, high=high, n=point["n"])
    return estimate_text(estimate, scale.digits, scale.unit)


def _correlation_text(found: pd.DataFrame) -> str:
    overall = found[found["task"] == ALL_TASKS].to_dict("records")
    parts = [
        f"{row['correlation']} {_correlation(row)}".replace("Pearson, log", "Pearson with log")
        for row in overall
    ]
    return f"{'; '.join(parts)} over {overall[0]['n']} vectors"


def _correlation(row: dict[Hashable, Any]) -> str:
    if pd.isna(row["value"]):
        return "not defined"
    return estimate_text(Estimate(**{name: row[name] for name in ("value", "low", "high", "n")}))
