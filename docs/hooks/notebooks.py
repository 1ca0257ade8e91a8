"""A hook of mkdocs: the notebooks of the top-level folder, as they were saved, behind "Notebooks".

What mkdocs-jupyter reads is a copy whose Plotly figures are HTML over one script of the site's own,
so that notebooks need not hold that script and pages fetch nothing.
"""

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
import plotly.io
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from plotly.offline import get_plotlyjs

SECTION = "Notebooks"
FIGURE, HTML = "application/vnd.plotly.v1+json", "text/html"
SCRIPT = "javascripts/plotly.min.js"
FETCHED = re.compile(r'<script[^>]+src="https?:[^>]*></script>')

_copies = TemporaryDirectory()


def on_config(config: MkDocsConfig) -> None:
    """Add each notebook to the navigation."""
    for entry in config.nav or ():
        if SECTION in entry:
            entry[SECTION].extend(f"notebooks/{path.name}" for path in _notebooks(config))


@event_priority(100)  # before mkdocs-jupyter looks for notebooks among the files
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add each notebook to the files, under notebooks/."""
    for path in _notebooks(config):
        name, notebook = f"notebooks/{path.name}", nbformat.read(path, as_version=4)
        _draw(notebook)
        copy = Path(_copies.name, name)
        copy.parent.mkdir(exist_ok=True)
        nbformat.write(notebook, copy)
        files.append(File(name, _copies.name, config.site_dir, config.use_directory_urls))
    if _notebooks(config):
        files.append(File.generated(config, SCRIPT, content=get_plotlyjs()))
    return files


def _draw(notebook: Any) -> None:
    script: str | bool = f"../{SCRIPT}"  # once, with the first figure
    for output in (one for cell in notebook.cells for one in cell.get("outputs", ())):
        data = output.get("data", {})
        if FIGURE in data:
            figure = {key: value for key, value in data[FIGURE].items() if key != "config"}
            data[HTML] = plotly.io.to_html(
                figure, full_html=False, include_plotlyjs=script, validate=False
            )
            script = False
        elif HTML in data:
            data[HTML] = FETCHED.sub("", data[HTML])


def _notebooks(config: MkDocsConfig) -> list[Path]:
    return sorted(Path(config.config_file_path).parent.glob("notebooks/*.ipynb"))
