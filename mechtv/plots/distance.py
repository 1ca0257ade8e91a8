"""dNTP: how far each vector's next-token distribution is from the in-context one."""

from collections.abc import Sequence

import plotly.graph_objects as go

from mechtv.errors import InvalidInput
from mechtv.evaluation.dntp import Divergence, Over
from mechtv.overview import Overview, Setting
from mechtv.plots.accuracy import by_method
from mechtv.plots.reference import reference_traces
from mechtv.plots.room import finished
from mechtv.plots.style import INK, about, error_bars, hover, identity, label_of, look_of, titled

NATS = "nats"
REFERENCE = "zero-shot"


def dntp_bars(overview: Overview, over: Over = "vocabulary") -> go.Figure:
    """The dNTP of the vectors at each depth, in nats, with the zero-shot model as a line.

    0 means the very distribution that the model has in context; lower is nearer to it. Error bars
    and the band are 95 % intervals.

    Args:
        over: the tokens compared: the whole `vocabulary`, or the `labels` (for open answers the
            first tokens of all answers).

    Raises:
        InvalidInput: if the overview has no dNTP over these tokens.
    """
    zero_shot = divergence_of(overview[REFERENCE], over)
    where = about(overview.task.name, overview.model.name)
    figure = titled(
        f"Distance from in context: {_tokens(overview, zero_shot)}",
        f"{where} · n = {zero_shot.estimate.n} test queries",
        f"0: same next-token distribution as with {overview.shots} shots; lower is nearer",
        height=250,
    )
    depths = overview.layers
    edges = (-0.5, len(depths) - 0.5)
    label = label_of(REFERENCE, overview.shots)
    x = (edges[0], *map(float, range(len(depths))), edges[1])
    figure.add_traces(reference_traces(REFERENCE, label, zero_shot.estimate, x, NATS))
    for name, settings in by_method(overview).items():
        figure.add_trace(_bars(name, label_of(name, overview.shots), settings, depths, over))
    figure.update_layout(barmode="group", bargap=0.3, bargroupgap=0.08)
    figure.update_xaxes(
        title_text="Injection layer",
        range=edges,
        tickvals=list(range(len(depths))),
        ticktext=[str(layer) for layer in depths],
    )
    figure.update_yaxes(title_text="dNTP (nats)")
    return finished(figure)


def divergence_of(setting: Setting, over: str) -> Divergence:
    """A setting's dNTP over `labels` or `vocabulary`.

    Raises:
        InvalidInput: if it has none.
    """
    for divergence in setting.divergences:
        if divergence.over == over:
            return divergence
    known = ", ".join(repr(divergence.over) for divergence in setting.divergences)
    raise InvalidInput(f"{setting.name!r} has no dNTP over {over!r}; it has {known or 'none'}.")


def _tokens(overview: Overview, divergence: Divergence) -> str:
    if divergence.over == "vocabulary":
        return "vocabulary"
    return f"{divergence.n_tokens} {'labels' if overview.task.labels else 'answer tokens'}"


def _bars(
    name: str, label: str, settings: Sequence[Setting], depths: Sequence[int], over: str
) -> go.Bar:
    look = look_of(name)
    estimates = [divergence_of(setting, over).estimate for setting in settings]
    return go.Bar(
        **identity(name, label),
        x=[depths.index(setting.layer) for setting in settings if setting.layer is not None],
        y=[estimate.value for estimate in estimates],
        error_y=error_bars(estimates) | {"color": INK},
        marker={
            "color": look.color,
            "pattern": {"shape": look.pattern, "fillmode": "overlay", "solidity": 0.15, "size": 9},
        },
        hovertext=[
            hover(f"{label}, layer {setting.layer}", estimate, NATS)
            for setting, estimate in zip(settings, estimates, strict=True)
        ],
        hovertemplate="%{hovertext}<extra></extra>",
    )
