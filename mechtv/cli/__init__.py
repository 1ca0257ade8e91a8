"""The command line: `mechtv run`, `tasks`, `learn`, `extract`, `compare`, `evaluate`, `show`.

A thin user of the library. Everything heavy is imported inside the commands, so `--help` is quick.
"""

import sys

import typer

from mechtv.cli.commands import app

__all__ = ["app", "main"]


def main() -> None:
    """The entry point: one clear sentence for what the user can mend, exit status 2."""
    from mechtv.errors import MechtvError

    try:
        app()
    except MechtvError as error:
        typer.echo(f"mechtv: {error}", err=True)
        sys.exit(2)
