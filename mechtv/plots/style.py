"""The house style: one template, and one fixed look for each setting.

A setting keeps its colour, marker and dash in every figure, so figures can be read side by side;
marker and dash tell settings apart without colour. The template is handed to each figure and never
registered, so the user's own Plotly defaults stay as they are.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from mechtv.evaluation.intervals import Estimate

INK, MUTED, GRID = "#1f2328", "#57606a", "#e3e6ea"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
LONGEST_NAME = 30
WIDEST = 80  # characters of a subtitle's line in a figure of 600 pixels
TOGETHER = r"(?<=\d) (?=%)|(?<=\bn) (?==)|(?<=\bn =) "  # blanks at which none is broken
ENDS = ("; ", " · ", " ")  # where a line is broken, the best place first


@dataclass(frozen=True, kw_only=True)
class Look:
    """How a setting is drawn, and what it is called in front of people."""

    label: str
    color: str
    symbol: str = "circle"
    dash: str = "solid"
    pattern: str = ""


LOOKS = {
    "learned": Look(label="Learned vector", color="#0072b2"),
    "learned-dntp": Look(
        label="Learned vector (dNTP)",
        color="#332288",
        symbol="triangle-down",
        dash="14px,3px,3px,3px",
        pattern=".",
    ),
    "hidden_state": Look(
        label="Hidden-state vector", color="#d55e00", symbol="square", dash="dash", pattern="/"
    ),
    "in-context": Look(
        label="In context", color="#009e73", symbol="diamond", dash="longdashdot", pattern="+"
    ),
    "zero-shot": Look(label="Zero-shot", color="#000000", symbol="x", dash="dot", pattern="."),
    "function_vector": Look(
        label="Function vector", color="#cc79a7", symbol="triangle-up", dash="dashdot", pattern="\\"
    ),
    "state_vector": Look(
        label="State vector", color="#e69f00", symbol="cross", dash="longdash", pattern="x"
    ),
    "i2cl": Look(label="I2CL", color="#56b4e9", symbol="star", dash="10px,3px", pattern="-"),
    "linear": Look(
        label="Linear map", color="#f0e442", symbol="hexagon", dash="4px,8px", pattern="|"
    ),
    "constant": Look(
        label="Constant map",
        color="#999999",
        symbol="hourglass",
        dash="8px,3px,2px,3px,2px,3px",
        pattern="+",
    ),
    "mlp": Look(
        label="Residual MLP", color="#7b3f00", symbol="bowtie", dash="16px,8px", pattern="-"
    ),
}
"""The colours are those of Okabe and Ito, made for every kind of colour vision; where their eight
run out, darker ones and a grey. Plotly has eight patterns: two looks that share one differ in
lightness."""

SMALL = {"font": {"size": 13}}
DEPTH_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon", "x")

TEMPLATE = go.layout.Template(
    layout={
        "font": {"family": FONT, "size": 14, "color": INK},
        "title": {
            "font": {"size": 16},
            "x": 0,
            "xref": "container",
            "y": 1,
            "yanchor": "top",
            "pad": {"l": 16, "t": 14},
            "subtitle": {"font": {"size": 13, "color": MUTED}},
        },
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "colorway": [look.color for look in LOOKS.values()],
        "margin": {"l": 78, "r": 20},
        "legend": {
            "orientation": "h",
            "x": 0.01,
            "xref": "container",
            "y": 0.01,
            "yref": "container",
            "yanchor": "bottom",
            "tracegroupgap": 0,
            "title": {"text": ""},
        },
        "hoverlabel": {"font": {"family": FONT, "size": 13}, "align": "left"},
        "xaxis": {
            "gridcolor": GRID,
            "linecolor": MUTED,
            "ticks": "outside",
            "tickcolor": MUTED,
            "zeroline": False,
            "title": {"standoff": 8, "font": {"size": 14}},
            "autotickangles": [0, -90],
        },
        "yaxis": {
            "gridcolor": GRID,
            "zeroline": False,
            "rangemode": "tozero",
            "title": {"standoff": 8, "font": {"size": 14}},
        },
    },
    data={
        "bar": [{"error_y": {"color": INK}}],
        "heatmap": [{"colorbar": {"outlinewidth": 0, "thickness": 14, "title": SMALL}}],
    },
)


def look_of(name: str) -> Look:
    """The look of a setting; a neutral one for a method that has none yet."""
    unknown = Look(label=name.replace("_", " ").capitalize(), color=MUTED, symbol="pentagon")
    return LOOKS.get(name, unknown)


def identity(name: str, label: str) -> dict[str, object]:
    """What a setting's trace is called, and its place in the legend: the same in every figure."""
    place = list(LOOKS).index(name) if name in LOOKS else len(LOOKS)
    return {"name": plain(label), "legendgroup": name, "legendrank": place}


def label_of(name: str, shots: int) -> str:
    """A setting's name for people, such as "In context (8 shots)"."""
    demonstrations = f" ({shots} shot{'s' if shots != 1 else ''})" if name == "in-context" else ""
    return look_of(name).label + demonstrations


def depth_colors(n: int) -> list[str]:
    """`n` colours from dark to light, ordered for every kind of colour vision, dark on white."""
    colors: list[str] = sample_colorscale("Viridis", np.linspace(0, 0.7, n).tolist())
    return colors


def channels(color: str) -> tuple[int, int, int]:
    """Red, green and blue of "#rrggbb", or of Plotly's "rgb(r, g, b)" and "rgba(r, g, b, a)"."""
    if color.startswith("#"):
        return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)
    red, green, blue = color.partition("(")[2].rstrip(")").split(",")[:3]
    return int(red), int(green), int(blue)


def plain(text: str) -> str:
    """Text as Plotly shows it literally: it would read tags and entities."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def about(*names: str) -> str:
    """Task and model for a subtitle; of a long name (a path) the end is kept."""
    short = (n if len(n) <= LONGEST_NAME else f"…{n[1 - LONGEST_NAME :]}" for n in names)
    return plain(" · ".join(short))


def titled(title: str, *subtitle: str, height: int) -> go.Figure:
    """An empty figure in the house style; each part of the subtitle begins a line of its own."""
    figure = go.Figure()
    lines = [line for part in subtitle for line in wrapped(part)]
    text = {"text": f"<b>{title}</b>", "subtitle": {"text": "<br>".join(lines)}}
    figure.update_layout(template=TEMPLATE, title=text, height=height)
    return figure


def wrapped(text: str, widest: int = WIDEST) -> list[str]:
    """The lines of a text, none longer than `widest` unless one word is."""
    lines = []
    for line in re.sub(TOGETHER, "\xa0", text).split("<br>"):
        while len(line) > widest:
            places = (line.rfind(end, widest // 3, widest + 1) for end in ENDS)
            at = next((place for place in places if place > 0), line.find(" "))
            if at < 0:
                break
            lines.append(line[: at + 1].rstrip())
            line = line[at + 1 :].removeprefix(" ").removeprefix("· ")
        lines.append(line)
    return [line.replace("\xa0", " ") for line in lines]


def estimate_text(estimate: Estimate, digits: int = 2, unit: str = "") -> str:
    """A value with its interval, such as "0.60 [0.50, 0.69]"; without one where it is unknown."""
    value = fixed(estimate.value, digits)
    interval = interval_text(estimate, digits)
    return " ".join(part for part in (value, interval, unit) if part)


def interval_text(estimate: Estimate, digits: int = 2) -> str:
    """The interval alone, such as "[0.50, 0.69]"; empty where it is unknown."""
    if np.isnan([estimate.low, estimate.high]).any():
        return ""
    return f"[{fixed(estimate.low, digits)}, {fixed(estimate.high, digits)}]"


def fixed(value: float, digits: int = 2) -> str:
    """A number with a true minus sign, and never "-0.00"."""
    return f"{value:z.{digits}f}".replace("-", "−")


def error_bars(estimates: Sequence[Estimate]) -> dict[str, object]:
    """Plotly's error bars for 95 % intervals, hidden where none is known."""
    return {
        "type": "data",
        "visible": any(e.low == e.low for e in estimates),
        "symmetric": False,
        "array": [e.high - e.value for e in estimates],
        "arrayminus": [e.value - e.low for e in estimates],
        "thickness": 1.5,
        "width": 5,
    }


def hover(label: str, estimate: Estimate, unit: str = "") -> str:
    """The text at the pointer: what it is, value, interval, n."""
    numbers = estimate_text(estimate, unit=unit)
    return f"<b>{plain(label)}</b><br>{numbers}<br>{basis_text(estimate)}"


def basis_text(estimate: Estimate, interval: str = "95 % interval") -> str:
    """What the numbers rest on: n, and what the brackets hold, where there are any."""
    return f"{interval}, n = {estimate.n}" if interval_text(estimate) else f"n = {estimate.n}"


def at_least(estimate: Estimate, end: float) -> Estimate:
    """An estimate as it is drawn, nothing of it below the end."""
    value, low, high = (max(x, end) for x in (estimate.value, estimate.low, estimate.high))
    return replace(estimate, value=value, low=low, high=high if estimate.value > end else end)
