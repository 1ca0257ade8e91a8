"""The commands about studies, one function each: a thin user of `mechtv.study`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mechtv.cli.options import app

if TYPE_CHECKING:
    from mechtv.study import StudyResults

study = typer.Typer(
    help="Studies of many models, tasks, methods, layers and seeds; finished cells are kept.",
    no_args_is_help=True,
)
app.add_typer(study, name="study")

Folder = Annotated[Path, typer.Argument(help="The folder of a study.")]
Workers = Annotated[
    int, typer.Option(help="Local processes, or Slurm jobs with --slurm; 0 runs in this process.")
]
Scheduler = Annotated[
    str | None, typer.Option(help="The address of a Dask scheduler, e.g. tcp://10.0.0.1:8786.")
]
Slurm = Annotated[
    list[str] | None,
    typer.Option(help="An option of Slurm jobs, e.g. queue=gpu; may be repeated."),
]
AcceptOlder = Annotated[
    bool, typer.Option("--accept-older", help="Take cells that other code computed as they are.")
]
RetryFailed = Annotated[bool, typer.Option("--retry-failed", help="Compute failed cells again.")]


@study.command()
def plan(file: Annotated[Path, typer.Argument(help="The study as a TOML file.")]) -> None:
    """Check a study, and say how many cells it has and about what it takes. Runs nothing."""
    from mechtv.study import Study, estimate

    described = Study.read(file)
    described.check()
    typer.echo(estimate(described).sentence())


@study.command()
def run(
    file: Annotated[Path, typer.Argument(help="The study as a TOML file.")],
    out: Annotated[
        Path | None, typer.Option(help="The folder of its cells; out/NAME if left out.")
    ] = None,
    workers: Workers = 0,
    scheduler: Scheduler = None,
    slurm: Slurm = None,
    retry_failed: RetryFailed = False,
    accept_older: AcceptOlder = False,
) -> None:
    """Compute the cells of a study that its folder lacks."""
    from mechtv.study import Study, estimate

    described = Study.read(file)
    described.check()
    folder = out or Path("out") / described.name
    left = estimate(described, folder, retry_failed=retry_failed, accept_older=accept_older)
    typer.echo(left.sentence())
    _run(described, folder, workers, scheduler, slurm, retry_failed, accept_older)


@study.command()
def resume(
    folder: Folder,
    workers: Workers = 0,
    scheduler: Scheduler = None,
    slurm: Slurm = None,
    retry_failed: RetryFailed = False,
    accept_older: AcceptOlder = False,
) -> None:
    """Go on with the study of a folder: what was in flight is computed again, no more."""
    from mechtv.study import StudyResults

    described = StudyResults.load(folder).study
    _run(described, folder, workers, scheduler, slurm, retry_failed, accept_older)


@study.command()
def status(folder: Folder) -> None:
    """How many cells are done, failed, damaged, of older code or missing, and the errors."""
    from mechtv.study import StudyResults

    results = StudyResults.load(folder)
    typer.echo(results.status().to_string(index=False))
    _say(results)
    for row in results.errors().itertuples():
        typer.echo(f"{row.cell}: {row.error}")


@study.command()
def export(
    folder: Folder,
    file: Annotated[Path, typer.Argument(help="The file to write: .csv or .parquet.")],
    accept_older: AcceptOlder = False,
) -> None:
    """Write all finished cells as one tidy table."""
    from mechtv.study import StudyResults

    results = StudyResults.load(folder)
    typer.echo(f"Saved {results.export(file, accept_older=accept_older)}")
    _say(results)


@app.command()
def report(
    folder: Folder,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    accept_older: AcceptOlder = False,
) -> None:
    """Write one page about a study: answer, figures, what holds, state, provenance."""
    from mechtv.report import write_study
    from mechtv.study import StudyResults

    results = StudyResults.load(folder)
    typer.echo(f"Open {write_study(results, out, accept_older=accept_older)}")
    _say(results)


def _run(
    described: Any,
    folder: Path,
    workers: int,
    scheduler: str | None,
    slurm: list[str] | None,
    retry_failed: bool,
    accept_older: bool,
) -> None:
    from mechtv.cli.values import options_of
    from mechtv.study import run_study

    results = run_study(
        described,
        folder,
        workers=workers,
        scheduler=scheduler,
        slurm=options_of(slurm) or None,
        retry_failed=retry_failed,
        accept_older=accept_older,
    )
    _say(results)


def _say(results: "StudyResults") -> None:
    done, total = results.counts().get("done", 0), len(results.study.cells)
    typer.echo(f"{done} of {total} cells are done.")
    for notice in results.notices():
        typer.echo(notice)
