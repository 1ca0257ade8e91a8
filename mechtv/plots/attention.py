"""Where key heads and random heads look from the last token, as stacked shares."""

import plotly.graph_objects as go

from mechtv.analysis.attention import PARTS, AttentionShares
from mechtv.evaluation.intervals import Estimate, mean
from mechtv.plots.style import LOOKS, about, hover, titled

HEIGHT = 500
PATTERN = {"fillmode": "overlay", "solidity": 0.15, "size": 7}
MOST_LEVEL = 24  # labels that fit side by side
COLORS = {
    "first token": ("First token (sink)", "#b8bec6", ""),
    "rest": ("Rest of the prompt", LOOKS["linear"].color, "/"),
    "final tokens": ("Final tokens before the last", LOOKS["i2cl"].color, "\\"),
    "last token": ("Last token, where θ is", LOOKS["learned"].color, ""),
}
GROUPS = {"key": "Key heads", "random": "Random heads"}


def attention_shares(shares: AttentionShares) -> go.Figure:
    """The attention from the last token in four parts: both groups' means, then each key head."""
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
    ticks = [name.removeprefix("Head ").replace(" ", "<br>") for name in names]
    for number, part in enumerate(PARTS):
        estimates = [means[group][part] for group in GROUPS]
        estimates += [mean(own[:, number]) for own in shares.shares]
        figure.add_trace(_bars(part, names, estimates))
    figure.add_vline(x=1.5, line={"width": 1, "dash": "dot"})
    figure.update_layout(barmode="stack", bargap=0.2, legend_traceorder="normal")
    figure.update_xaxes(
        showgrid=False, tickvals=list(range(len(names))), ticktext=ticks,
        tickangle=0 if len(names) <= MOST_LEVEL else 90,
    )  # fmt: skip
    return figure.update_yaxes(title_text="Share of attention", range=[0, 1.0], dtick=0.2)


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
