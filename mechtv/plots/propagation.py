"""How nearly linearly vectors travel, by layer: the fit's R², and answers with W θ in θ's place."""

from collections.abc import Callable, Iterable, Sequence

import plotly.graph_objects as go

from mechtv.analysis.propagation import FULL, MAPPED, MEAN_EFFECT, ZERO_SHOT, Propagation
from mechtv.errors import InvalidInput
from mechtv.evaluation.intervals import Estimate
from mechtv.plots.panels import panels
from mechtv.plots.room import finished
from mechtv.plots.scores import FULL as ACCURACY
from mechtv.plots.scores import Scale
from mechtv.plots.style import Look, about, at_least, error_bars, hover, look_of

COLUMNS = 3  # panels side by side
LEAST_R2 = -0.5  # below it a fit is worse than none, and how much worse would hide the rest

R2S = {
    "R²": Look(label="From no effect", color=look_of("learned").color),
    "R², centred": Look(
        label="Of the variation (centred)",
        color=look_of("hidden_state").color,
        symbol="square",
        dash="dash",
    ),
}
SETTINGS = {
    FULL: Look(label="θ at its layer", color=look_of("learned").color),
    MAPPED: Look(
        label="Wθ at the end",
        color=look_of("hidden_state").color,
        symbol="square",
        dash="dash",
    ),
    MEAN_EFFECT: Look(
        label="Mean effect at the end",
        color=look_of("in-context").color,
        symbol="diamond",
        dash="dashdot",
    ),
    ZERO_SHOT: look_of("zero-shot"),
}


def propagation_r2(results: Propagation | Sequence[Propagation]) -> go.Figure:
    """R² on held-out perturbations by layer, centred and uncentred: a panel a task.

    Bars are 95 % intervals over perturbations. A value below -0.5 is drawn there; the text at the
    pointer has it.

    Raises:
        InvalidInput: for no results, or two of one task and layer.
    """
    several = _several(results)
    first = several[0]
    lines = [
        f"{_about(several)} · spread {_spreads(several)} of ‖θ‖",
        f"Fitted to effects over n = {_numbers(one.n for one in several)} training queries; scored "
        f"on {_numbers(one.held_out.r2().n for one in several)} other perturbations over "
        f"n = {_numbers(one.n_held_out_queries for one in several)} {first.split} queries; "
        f"bars: 95 % intervals{_no_map(several)}",
    ]
    figure = _lines(
        "How much of a vector's effect one matrix explains",
        lines,
        several,
        R2S,
        lambda one, name: one.held_out.r2(centred=name != "R²"),
        "R² on held-out perturbations",
    )
    figure.update_yaxes(range=[LEAST_R2 - 0.05, 1.05], dtick=0.5)
    return finished(figure)


def propagation_accuracy(
    results: Propagation | Sequence[Propagation], score: str = ACCURACY
) -> go.Figure:
    """A score of θ at its layer, of W θ at the end instead, and of the mean effect there, by layer.

    Args:
        score: `accuracy, full vocabulary`, `accuracy, label-restricted`, `log-probability` or
            `logit difference`.

    Raises:
        InvalidInput: for no results, two of one task and layer, or a score that a task lacks.
    """
    several = _several(results)
    for one in several:
        if score not in one.answers[FULL].estimates():
            known = ", ".join(one.answers[FULL].estimates())
            raise InvalidInput(f"The task {one.task!r} has no score {score!r}; it has {known}.")
    scale = _scale(score)
    figure = _lines(
        f"{scale.name}: θ at its layer, Wθ at the end",
        [
            f"{_about(several)} · spread {_spreads(several)} of ‖θ‖",
            f"n = {_numbers(one.answers[FULL].estimates()[score].n for one in several)} "
            f"{several[0].split} queries; bars: 95 % intervals{_no_map(several)}",
        ],
        several,
        SETTINGS,
        lambda one, name: one.answers[name].estimates()[score],
        scale.title,
    )
    if score.startswith("accuracy"):
        figure.update_yaxes(range=[-0.03, 1.03], dtick=0.2)
    else:
        figure.update_yaxes(rangemode="normal")
    return finished(figure)


def _lines(
    title: str,
    lines: Sequence[str],
    several: Sequence[Propagation],
    looks: dict[str, Look],
    estimate: Callable[[Propagation, str], Estimate],
    y_title: str,
) -> go.Figure:
    tasks = list(dict.fromkeys(one.task for one in several))
    titles = ("Layer at whose input θ is added", y_title)
    figure, places = panels(title, lines, tasks, columns=COLUMNS, titles=titles)
    for (row, col), task in zip(places, tasks, strict=True):
        own = sorted((one for one in several if one.task == task), key=lambda one: one.layer)
        for name, look in reversed(looks.items()):  # the first lies on top
            found = [estimate(one, name) for one in own]
            trace = _line(name, look, [one.layer for one in own], found)
            trace.legendrank = list(looks).index(name)
            figure.add_trace(trace, row=row, col=col)
    layers = sorted({one.layer for one in several})
    edge = max(0.5, (layers[-1] - layers[0]) / 25)
    figure.update_xaxes(range=(layers[0] - edge, layers[-1] + edge))
    if len(layers) <= 8:
        figure.update_xaxes(tickvals=layers)
    return figure


def _line(
    name: str, look: Look, layers: Sequence[int], estimates: Sequence[Estimate]
) -> go.Scatter:
    is_r2 = name in R2S
    drawn = [at_least(e, LEAST_R2) for e in estimates] if is_r2 else list(estimates)
    return go.Scatter(
        name=look.label,
        legendgroup=name,
        x=list(layers),
        y=[e.value for e in drawn],
        error_y=error_bars(drawn) | {"thickness": 1, "width": 3},
        mode="lines+markers",
        line={"color": look.color, "dash": look.dash, "width": 2},
        marker={"symbol": look.symbol, "size": 8},
        hovertext=[
            hover(f"{f'R², {look.label.lower()}' if is_r2 else look.label}, layer {layer}", e)
            for layer, e in zip(layers, estimates, strict=True)
        ],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _several(results: Propagation | Sequence[Propagation]) -> list[Propagation]:
    several = [results] if isinstance(results, Propagation) else list(results)
    if not several:
        raise InvalidInput("There are no fits to draw; give at least one.")
    places = [(one.task, one.layer) for one in several]
    twice = next((place for place in places if places.count(place) > 1), None)
    if twice:
        raise InvalidInput(
            f"The fit of {twice[0]!r} at layer {twice[1]} is there twice; draw each spread's fits "
            "in a figure of its own."
        )
    return several


def _scale(score: str) -> Scale:
    if score == "logit difference":
        return Scale(name="Logit difference", title="Logit difference (answer less its rivals)")
    if score == "log-probability":
        return Scale(name="Log-probability", title="Log-probability of the answer's token (nats)")
    return Scale.of(score)


def _about(several: Sequence[Propagation]) -> str:
    models = sorted({one.provenance.model for one in several})
    tasks = sorted({one.task for one in several})
    return about(*(tasks if len(tasks) == 1 else ()), *models)


def _spreads(several: Sequence[Propagation]) -> str:
    return ", ".join(f"{size:g}" for size in sorted({s for one in several for s in one.spread}))


def _numbers(values: Iterable[int]) -> str:
    """All of them where they are one, else the least and the largest."""
    found = sorted(set(values))
    return "–".join(map(str, found[:1] + found[1:][-1:]))


def _no_map(several: Sequence[Propagation]) -> str:
    layers = sorted({one.layer for one in several if not one.is_map})
    if not layers:
        return ""
    return f"<br>No full map at layer {', '.join(map(str, layers))}: W is known in a span only"
