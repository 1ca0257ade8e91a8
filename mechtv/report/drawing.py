"""Figures in a page: drawn when they come into sight, in the colours of the reader's page."""

import html
import json
import re
from importlib.resources import files
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from mechtv.plots import dark
from mechtv.plots.saving import CONFIG
from mechtv.report.markup import Html, text

HEIGHT = 450  # pixels of a figure that has none of its own: Plotly's own choice


def scripts() -> Html:
    """Plotly, and the function `draw` that every figure of a page calls."""
    draw = (files("mechtv.report") / "draw.js").read_text(encoding="utf-8")
    return Html(f"{get_plotlyjs()}\nconst config = {_json(CONFIG)};\n{draw}")


def drawn(figure: go.Figure, name: str) -> Html:
    """The figure's element, and the call that draws it; the page has `scripts` once."""
    light, night = (json.loads(one.to_json()) for one in (figure, dark(figure)))
    title = html.unescape(re.sub("<[^>]*>", "", figure.layout.title.text or name))
    height = figure.layout.height or HEIGHT
    return Html(
        f'<div id="{text(name)}" role="img" aria-label="{text(title)}" style="height: {height}px">'
        f"</div>\n<script>draw({_json(name)}, {_json(light)}, {_json(changed(light, night))})"
        "</script>"
    )


def changed(light: Any, dark: Any) -> Any:
    """What the second has other than the first: nested as they are, the changed leaves alone.

    A place in a list is a key. Only what is in the second counts.
    """
    if isinstance(light, list) and isinstance(dark, list) and len(light) == len(dark):
        light, dark = (dict(enumerate(one)) for one in (light, dark))
    if not (isinstance(light, dict) and isinstance(dark, dict)):
        return dark
    other = {key: value for key, value in dark.items() if light.get(key) != value}
    return {key: changed(light.get(key), value) for key, value in other.items()}


def _json(value: Any) -> str:
    """JSON inside a script, which no text of it can end."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).replace("<", "\\u003c")
