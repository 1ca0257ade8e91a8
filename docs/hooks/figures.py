"""A hook of mkdocs: the papers' figures, as last run in full, in place of `<!-- figures -->`.

Each has what the paper claims, what was found, its picture, its table, and where they come from.
"""

import ast
import html
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PLACE, FOLDER = "<!-- figures -->", "figures"
PAPERS = {
    "l": "Task Vectors, Learned Not Extracted",
    "d": "Distributional Alignment as a Criterion for Designing Task Vectors in "
    "In-Context Learning",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pictures and tables."""
    for origin in _origins(config):
        for path in (origin.with_suffix(".svg"), origin.with_suffix(".csv")):
            name = f"{FOLDER}/{path.name}"
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, config: MkDocsConfig, **_: Any) -> str:
    """Put the figures into the page that asks for them."""
    if PLACE not in markdown:
        return markdown
    parts = []
    for letter, paper in PAPERS.items():
        parts.append(f"## {paper}")
        parts += [_section(path) for path in _origins(config) if path.name.startswith(letter)]
    return markdown.replace(PLACE, "\n\n".join(parts))


def _section(origin: Path) -> str:
    about = json.loads(origin.read_text())
    name = origin.stem
    script = origin.parents[1] / f"{name}.py"
    title = (
        (ast.get_docstring(ast.parse(script.read_text())) or name).partition("\n")[0].rstrip(".")
    )
    found = "\n".join(f"- {_escaped(one)}" for one in about["said"]) or "- See the picture."
    settings = about["settings"]
    whence = (
        f"[Table]({FOLDER}/{name}.csv)",
        settings["model_name"],
        ", ".join(settings["tasks"]),
        f"at most {settings['n']} test queries a task",
        f"seed {', '.join(map(str, settings['seeds']))}",
        about["date"],
        f"`{about['command']}`",
    )
    return "\n\n".join(
        [
            f"### {title}",
            f"*The paper:* {about['claim']}",
            f"*Here:*\n\n{found}",
            f"![{title}]({FOLDER}/{name}.svg)",
            " · ".join(whence),
        ]
    )


def _escaped(sentence: str) -> str:
    """A sentence that may hold any tokens, as Markdown."""
    return re.sub(r"([\\`*_\[\]])", r"\\\1", html.escape(sentence, quote=False))


def _origins(config: MkDocsConfig) -> list[Path]:
    results = Path(config.config_file_path).parent / "figures" / "results"
    return sorted(results.glob("[dl][0-9]*_*.json"))
