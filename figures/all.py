"""Every figure and table of both papers, one after the other.

    make figures                                  (all, in full: hours)
    make figures ARGS=--quick                     (all, small: under half an hour)
    python figures/all.py --only l01,d5 --quick

A figure that fails does not stop the others; finished cells are kept, so that the command can be
given again. Options are those of the scripts.
"""

import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from common import run, setup_of

from mechtv.progress import progress_bar


def main(
    only: Annotated[str, typer.Option(help="Beginnings of names, parted by commas.")] = "",
    model: str = "smollm2-135m",
    seeds: str = "0",
    quick: Annotated[bool, typer.Option("--quick", help="Few tasks, layers, queries.")] = False,
    data: Annotated[Path | None, typer.Option(help="The folder of the papers' data sets.")] = None,
    out: Path = Path("out/figures"),
) -> None:
    scripts = sorted(Path(__file__).parent.glob("[dl][0-9]*_*.py"), key=_order)
    chosen = [s.stem for s in scripts if s.stem.startswith(tuple(only.split(",")))]
    failed = []
    with progress_bar(title="figures", total=len(chosen)) as bar:
        for name in chosen:
            began = time.monotonic()
            figure = import_module(name).FIGURE
            try:
                setup = setup_of(figure, model=model, seeds=seeds, quick=quick, data=data, out=out)
                run(figure, setup)
            except Exception as error:
                failed.append(name)
                typer.echo(f"{name} failed: {type(error).__name__}: {error}", err=True)
            typer.echo(f"{name}: {time.monotonic() - began:.0f} s")
            bar.update()
    if failed:
        sys.exit(f"{len(failed)} of {len(chosen)} failed: {', '.join(failed)}")


def _order(script: Path) -> tuple[bool, int]:
    """L1 to L13, then D1 to D8."""
    letter, number = script.stem[0], script.stem[1:].partition("_")[0]
    return letter == "d", int(number)


if __name__ == "__main__":
    typer.run(main)
