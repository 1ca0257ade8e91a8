"""A figure as a file: a page of its own, or a picture."""

import json
import re
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.io import to_html

from mechtv.errors import InvalidInput
from mechtv.files import write_whole

CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "modeBarButtons": [["toImage", "resetScale2d"]],
}
PICTURES = {".png": 2, ".svg": 1, ".pdf": 1}  # how many dots a pixel of the layout has
WIDTH = 1000
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>body {{ margin: 0; background: {paper}; }}</style>
</head>
<body>
{figure}
</body>
</html>
"""


def save(figure: go.Figure, path: str | Path, *, width: int | None = None) -> Path:
    """Write a figure to `path`, whole or not at all; the ending says how.

    `.html` is one page that works without a network. `.png` (two dots a pixel), `.svg` and `.pdf`
    are drawn by a Chrome or Chromium, and need the extra `static`. The same figure gives the same
    bytes as `.html`, and on one machine as `.svg`.

    Args:
        width: of a picture, in pixels (96 to the inch); the figure's own if None, or else 1000.

    Raises:
        InvalidInput: for another ending, if the folder does not exist or cannot be written, or if
            there is no kaleido or no browser to draw a picture.
    """
    path = Path(path)
    ending = path.suffix.lower()
    if ending == ".html":
        return write_whole(path, _page(figure).encode("utf-8"))
    if ending not in PICTURES:
        known = ", ".join((".html", *PICTURES))
        raise InvalidInput(f"A figure cannot be saved as {path.name!r}; the endings are {known}.")
    return write_whole(path, _picture(figure, ending, width or figure.layout.width or WIDTH))


def _page(figure: go.Figure) -> str:
    drawn = to_html(
        _ordered(figure),
        full_html=False,
        include_plotlyjs=True,
        div_id="figure",
        config=CONFIG,
        validate=False,
    )
    title = re.sub("<[^>]*>", "", figure.layout.title.text or "")
    template = figure.layout.template.layout
    paper = figure.layout.paper_bgcolor or template.paper_bgcolor or "white"
    return PAGE.format(title=title, paper=escape(paper), figure=drawn)


def _picture(figure: go.Figure, ending: str, width: int) -> bytes:
    try:
        import kaleido
        from kaleido.errors import BrowserFailedError, ChromeNotFoundError
    except ImportError as error:
        raise InvalidInput(
            f"To save a figure as {ending}, kaleido is needed: pip install 'mechtv[static]'; "
            ".html needs nothing more."
        ) from error
    content = _ordered(figure)
    for place, trace in enumerate(content["data"]):
        trace["uid"] = str(place)  # else drawn at random, and written into the picture
    options = {"format": ending[1:], "width": width, "scale": PICTURES[ending]}
    options["height"] = figure.layout.height or 500
    try:
        picture: bytes = kaleido.calc_fig_sync(content, opts=options, kopts={"mathjax": False})
    except (BrowserFailedError, ChromeNotFoundError) as error:
        raise InvalidInput(
            f"To save a figure as {ending}, a Chrome or Chromium is needed, and none could be "
            "started; install one, or let BROWSER_PATH be the path of its program."
        ) from error
    return _without_chance(picture) if ending == ".svg" else picture


def _ordered(figure: go.Figure) -> dict[str, Any]:
    """The figure with its options in order: copying it changes their order in the original too."""
    ordered: dict[str, Any] = json.loads(json.dumps(json.loads(figure.to_json()), sort_keys=True))
    return ordered


def _without_chance(svg: bytes) -> bytes:
    """The picture with a fixed name in the place of the random one in all its ids."""
    found = re.search(rb'id="defs-([0-9a-f]{6})"', svg)
    if not found:
        return svg
    return re.sub(rb'((?:"|#)[a-z-]*)' + found[1], rb"\g<1>figure", svg)
