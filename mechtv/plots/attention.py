"""Where key heads and random heads look from the last token, as stacked shares."""

import math

import plotly.graph_objects as go

from mechtv.analysis.attention import PARTS, AttentionShares
from mechtv.evaluation.intervals import Estimate, mean
from mechtv.plots.room import finished
from mechtv.plots.style import LOOKS, about, hover, titled

HEIGHT = 290
UPRIGHT = 6  # lines that are as high as an upright label is long
PATTERN = {"fillmode": "overlay", "solidity": 0.15, "size": 7}
MOST_LEVEL, MOST_LABELS = 8, 48  # bars whose labels fit side by side, level and upright
COLORS = {
    "first token": ("First token (sink)", "#b8bec6", ""),
    "rest": ("Rest of the prompt", LOOKS["linear"].color, "/"),
    "final tokens": ("Final tokens before the last", LOOKS["i2cl"].color, "\\"),
    "last token": ("Last token, where θ is", LOOKS["learned"].color, ""),
}
GROUPS = {"key": "Key heads", "random": "Random heads"}


def attention_shares(shares: AttentionShares) -> go.Figure:
    """The attention from the last token in four parts: both groups' means, then each key head.

    Of very many heads only some are named below their bars, all of them at the pointer.
    """
    figure = titled(
        "Attention of key heads from the last token",
        f"{about(shares.task, shares.provenance.model)} · θ at block {shares.layer} · "
        f"n = {len(shares.queries)} {shares.split} queries",
        f"Means over {len(shares.heads)} key and {len(shares.random_heads)} random heads, and each "
        f"key head (block.head); the final tokens are the last {shares.final}",
        height=HEIGHT,
    )
    means = {group: shares.estimates(group) for group in GROUPS}
    names = [*GROUPS.values(), *(f"Head {layer}.{head}" for layer, head in shares.heads)]
    for number, part in enumerate(PARTS):
        estimates = [means[group][part] for group in GROUPS]
        estimates += [mean(own[:, number]) for own in shares.shares]
        figure.add_trace(_bars(part, names, estimates))
    figure.add_vline(x=1.5, line={"width": 1, "dash": "dot"})
    figure.update_layout(barmode="stack", bargap=0.2, legend_traceorder="normal")
    figure.update_yaxes(title_text="Share of attention", range=[0, 1.0], dtick=0.2)
    return finished(figure, tick_lines=_name_bars(figure, names))


def _name_bars(figure: go.Figure, names: list[str]) -> int:
    """Labels side by side while they fit, then upright, then of some heads only.

    Returns how many lines high they are.
    """
    level = len(names) <= MOST_LEVEL
    heads = range(len(GROUPS), len(names), math.ceil(len(names) / MOST_LABELS))
    places = [*range(len(GROUPS)), *heads]
    texts = [names[place].removeprefix("Head ") for place in places]
    if level:
        texts = [text.replace(" ", "<br>") for text in texts]
    figure.update_xaxes(
        showgrid=False, tickvals=places, ticktext=texts, tickangle=0 if level else -90
    )
    return 2 if level else UPRIGHT


def _bars(part: str, names: list[str], estimates: list[Estimate]) -> go.Bar:
    label, color, pattern = COLORS[part]
    units = ["heads" if place < len(GROUPS) else "queries" for place in range(len(names))]
    texts = [
        f"{name}<br>{hover(label, e)} {unit}"
        for name, e, unit in zip(names, estimates, units, strict=True)
    ]
    return go.Bar(
        name=label,
        x=list(range(len(names))),
        y=[e.value for e in estimates],
        marker={"color": color, "pattern": {"shape": pattern, **PATTERN}},
        hovertext=texts,
        hovertemplate="%{hovertext}<extra></extra>",
    )
