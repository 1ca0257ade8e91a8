"""A hook of mkdocs: the help of every command, in place of `<!-- commands -->`."""

import re
from typing import Any

import typer
from typer.cli import get_docs_for_click

from mechtv.cli import app

PLACE = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the commands' help into the page that asks for it."""
    return markdown.replace(PLACE, _commands()) if PLACE in markdown else markdown


def _commands() -> str:
    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="mechtv")
    own = text[text.index("\n## ") :]  # behind the list of all commands
    own = re.sub(r"^\* `--help`.*\n", "", own, flags=re.MULTILINE)
    return own.replace("**Options**:\n\n\n", "")
