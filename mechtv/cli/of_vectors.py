"""The commands that take a vector's file, one function each.

A thin user of the library, as `commands` is; heavy imports stand inside the functions.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mechtv.cli.options import Device, Dtype, N, TemplateText, app
from mechtv.cli.values import at_home, names_in, write_table

if TYPE_CHECKING:
    from mechtv.study.explain import Finding


@app.command()
def evaluate(
    vector: Annotated[
        Path | None, typer.Argument(help="A vector's file; none for the model alone.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The vector's own if left out.")] = None,
    task: Annotated[str | None, typer.Option(help="The vector's own if left out.")] = None,
    template: TemplateText = None,
    shots: Annotated[int, typer.Option(help="Demonstrations before each query.")] = 0,
    icl_shots: Annotated[
        int, typer.Option(help="Demonstrations of the run that dNTP is from.")
    ] = 8,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    n: N = None,
    seed: Annotated[int | None, typer.Option(help="The vector's own if left out.")] = None,
    device: Device = None,
    dtype: Dtype = "float32",
) -> None:
    """Score a vector, or the model alone: accuracies, log-probability, and dNTP.

    What is left out is taken from the vector's card: its model, task, template and seed.
    """
    import pandas as pd

    from mechtv.evaluation import dntp
    from mechtv.evaluation import evaluate as scores
    from mechtv.vectors import TaskVector

    loaded = None if vector is None else TaskVector.load(vector)
    opened, chosen = at_home(loaded, model, task, template, device, dtype)
    options: dict[str, Any] = {"split": split, "n": n, "seed": seed}
    parts = [scores(opened, chosen, loaded, shots=shots, **options).table()]
    for over in ("labels", "vocabulary"):
        result = dntp(
            opened, chosen, loaded, shots=icl_shots, over=over, vector_shots=shots, **options
        )
        parts.append(result.table())
    table = pd.concat(parts, ignore_index=True)
    typer.echo(
        table[["task", "setting", "score", "value", "low", "high", "n"]].to_string(index=False)
    )


@app.command()
def explain(
    vector: Annotated[Path, typer.Argument(help="A vector's file.")],
    out: Annotated[Path, typer.Option(help="The folder for the page and the tables.")] = Path(
        "out/explain"
    ),
    model: Annotated[str | None, typer.Option(help="The vector's own if left out.")] = None,
    task: Annotated[str | None, typer.Option(help="The vector's own if left out.")] = None,
    template: TemplateText = None,
    parts: Annotated[
        str | None, typer.Option(help="Analyses, e.g. readers,heads; all if left out.")
    ] = None,
    n: N = None,
    seed: Annotated[int | None, typer.Option(help="The vector's own if left out.")] = None,
    device: Device = None,
    dtype: Dtype = "float32",
) -> None:
    """Why a vector works: OV circuits, readers, heads, linearity, rotation, lens, on one page.

    The table of each analysis is written as soon as it is done.
    """
    from mechtv.files import made_folder
    from mechtv.report import write_explanation
    from mechtv.report.findings import finding
    from mechtv.study.explain import check_parts
    from mechtv.study.explain import explain as explain_vector
    from mechtv.vectors import TaskVector

    loaded = TaskVector.load(vector)
    names = check_parts(names_in(parts))
    opened, chosen = at_home(loaded, model, task, template, device, dtype)
    tables = made_folder(out / "tables")

    def keep(found: "Finding") -> None:
        write_table(found.table(), tables / f"{found.name}.csv")
        typer.echo(f"{found.name} ({found.seconds:.0f} s): {finding(found) or 'done'}")

    explanation = explain_vector(
        opened, chosen, loaded, parts=names, n=n, seed=seed, on_finished=keep
    )
    write_table(explanation.tables()["evaluation"], tables / "evaluation.csv")
    write_table(explanation.table(), tables / "seconds.csv")
    page = write_explanation(explanation, out / "explanation.html")
    typer.echo(f"Done in {explanation.seconds:.0f} s. Open {page}")


@app.command()
def show(file: Annotated[Path, typer.Argument(help="A vector's file.")]) -> None:
    """Print a vector's card: where it came from and what it does."""
    import json

    from mechtv.vectors import TaskVector

    vector = TaskVector.load(file)
    typer.echo(f"{vector}\n\n{vector.table().to_string(index=False)}\n")
    card = vector.card.to_json()
    typer.echo(json.dumps({k: v for k, v in card.items() if k != "curve"}, indent=2))
    if vector.card.curve:
        typer.echo(f"\n{vector.training_curve().to_string(index=False)}")
