"""A figure for a dark page: the same figure in colours that stand out there."""

import colorsys
import math
from typing import Any

import numpy as np
import plotly.graph_objects as go

from mechtv.plots.style import GRID, INK, MUTED, channels

PAPER, DARK_INK, DARK_MUTED, DARK_GRID = "#1a2027", "#e6edf3", "#a3adb8", "#36404b"
NEUTRALS = {
    "white": PAPER,
    "#ffffff": PAPER,
    "#000000": DARK_INK,
    INK: DARK_INK,
    MUTED: DARK_MUTED,
    GRID: DARK_GRID,
}
LEAST_CONTRAST = 3.0  # of a mark against the page: WCAG 2.2, criterion 1.4.11
MOST_OF_SCALES = 3.5  # of the end of a heat map's scale, so that light letters stand out from it


def dark(figure: go.Figure) -> go.Figure:
    """A copy of any figure of `mechtv.plots` for a dark page.

    Paper, ink and grid change places; where a colour of a mark is too dark it is made lighter, with
    its hue, so that a setting is still known by it. What means zero on a heat map has the colour of
    the page, as it has in the light.
    """
    copy = go.Figure(figure)
    for part in (*copy.data, copy.layout):
        part.update(_recoloured(part.to_plotly_json()), overwrite=True)
    copy.update_layout(modebar={"color": DARK_MUTED, "activecolor": DARK_INK})
    defaults = copy.layout.template
    defaults.layout.shapedefaults.line.color = DARK_INK
    defaults.data.scatter = [{"marker": {"line": {"color": PAPER}}}]  # else Plotly's dark grey
    copy.update_traces(textfont={"color": DARK_INK}, selector={"type": "heatmap"})
    return copy


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours by WCAG 2.2: from 1, the same, to 21, black on white."""
    low, high = sorted(map(_luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def _recoloured(value: Any, name: str = "") -> Any:
    """Options as they are, but every colour among them as it is on a dark page."""
    if isinstance(value, dict):
        return {key: _recoloured(inner, key) for key, inner in value.items()}
    if isinstance(value, np.ndarray) and "color" in name:
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_recoloured(inner, name) for inner in value]
    if not isinstance(value, str) or "color" not in name:
        return value
    return _on_dark(value, MOST_OF_SCALES if name == "colorscale" else math.inf)


def _on_dark(color: str, most: float = math.inf) -> str:
    if color.lower() in NEUTRALS:
        return NEUTRALS[color.lower()]
    if not color.startswith(("#", "rgb")):
        return color  # the name of a scale or an axis
    opaque = _text(channels(color))
    lighter = NEUTRALS.get(opaque) or _shade(opaque, most)
    if not color.startswith("rgba"):
        return lighter
    opacity = color.rstrip(")").split(",")[3].strip()
    return f"rgba({', '.join(map(str, channels(lighter)))}, {opacity})"


def _shade(color: str, most: float) -> str:
    """The colour, or the nearest of its hue that stands out enough, and no more than `most`."""
    hue, lightness, saturation = colorsys.rgb_to_hls(*(c / 255 for c in channels(color)))
    while not LEAST_CONTRAST <= contrast(color, PAPER) <= most:
        lightness += 0.01 if contrast(color, PAPER) < LEAST_CONTRAST else -0.01
        rgb = colorsys.hls_to_rgb(hue, lightness, saturation)
        color = _text([round(255 * c) for c in rgb])
    return color


def _text(rgb: Any) -> str:
    return "#" + "".join(f"{channel:02x}" for channel in rgb)


def _luminance(color: str) -> float:
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (channel / 255 for channel in channels(color))
    ]
    return float(np.dot((0.2126, 0.7152, 0.0722), linear))
