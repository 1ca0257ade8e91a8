"""The command line: `mechtv run`, `learn`, `extract`, `compare`, `evaluate`, `explain`, `show`."""

import sys

import typer

from mechtv.cli import commands, of_vectors, studies  # noqa: F401 - they put commands into the app
from mechtv.cli.options import app

__all__ = ["app", "main"]


def main() -> None:
    """The entry point: one clear sentence for what the user can mend, exit status 2."""
    from mechtv.errors import MechtvError

    try:
        app()
    except MechtvError as error:
        typer.echo(f"mechtv: {error}", err=True)
        sys.exit(2)
