"""The commands that make vectors, one function each; those that take one stand in `of_vectors`.

A thin user of the library. Everything heavy is imported inside the commands, so `--help` is quick.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mechtv.cli.options import (
    Device,
    Dtype,
    Layers,
    MethodOptions,
    ModelName,
    N,
    Seed,
    TaskName,
    TemplateText,
    app,
)
from mechtv.cli.values import (
    check_folder,
    line_of,
    names_in,
    numbers,
    opened_model,
    options_by_method,
    options_of,
    task_named,
    write_table,
    write_text,
)

if TYPE_CHECKING:
    from mechtv.overview import Setting


@app.command()
def run(
    out: Annotated[Path, typer.Option(help="The folder for the page, tables and vectors.")] = Path(
        "out"
    ),
    model: ModelName = "smollm2-135m",
    task: TaskName = "present-past",
    template: TemplateText = None,
    layers: Layers = None,
    shots: Annotated[int, typer.Option(help="Demonstrations in context.")] = 8,
    epochs: Annotated[int, typer.Option(help="Of training at each depth, at most.")] = 6,
    n: N = None,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = "float32",
) -> None:
    """Learned vectors at several depths beside in-context, zero-shot and hidden-state: one page."""
    from mechtv.files import made_folder
    from mechtv.overview import run_overview
    from mechtv.report import write_report

    depths = numbers(layers)
    chosen, opened = task_named(task, template), opened_model(model, device, dtype)
    vectors = made_folder(out / "vectors")

    def keep(setting: "Setting") -> None:
        where = "" if setting.layer is None else f", layer {setting.layer}"
        typer.echo(f"{setting.name}{where}: accuracy {setting.evaluation.accuracy}")
        if setting.vector is not None:
            setting.vector.save(vectors / f"{setting.name}-layer{setting.layer:02d}.safetensors")

    overview = run_overview(
        opened,
        chosen,
        layers=depths,
        shots=shots,
        epochs=epochs,
        n=n,
        seed=seed,
        on_finished=keep,
    )
    write_table(overview.table(), out / "results.csv")
    write_table(overview.comparisons(), out / "comparisons.csv")
    write_table(overview.curves(), out / "curves.csv")
    page = write_report(overview, out / "report.html")
    typer.echo(f"Done in {overview.seconds:.0f} s. Open {page}")


@app.command()
def tasks() -> None:
    """List the tasks: name, number of examples, labels, description."""
    from mechtv.tasks import get_task, list_tasks
    from mechtv.tasks.sources import TEXT_SOURCES

    for name in list_tasks():
        if name not in TEXT_SOURCES:
            task = get_task(name)
            labels = f" [{'/'.join(task.labels)}]" if task.labels else ""
            typer.echo(f"{name:<26}{len(task):>5}  {task.description}{labels}")
        else:
            typer.echo(f"{name:<26}{'':>5}  Data set of the papers, read with `datasets`.")


@app.command()
def learn(
    out: Annotated[Path, typer.Option(help="The file to write, e.g. past.safetensors.")],
    model: ModelName = "smollm2-135m",
    task: TaskName = "present-past",
    template: TemplateText = None,
    layers: Annotated[
        str | None,
        typer.Option("--layers", help="Blocks, e.g. 8 or 8,12; the middle one if left out."),
    ] = None,
    positions: Annotated[
        str, typer.Option(help='Positions from the last token, e.g. "-1" or "-3,-1", or "all".')
    ] = "-1",
    objective: Annotated[str, typer.Option(help="answer, dntp or state.")] = "answer",
    shots: Annotated[int, typer.Option(help="Demonstrations in the training prompts.")] = 0,
    step_size: Annotated[float, typer.Option(help="Step in units of the residual stream.")] = 0.2,
    epochs: Annotated[int, typer.Option(help="At most so many passes over the data.")] = 10,
    batch_size: Annotated[int, typer.Option(help="Queries in one step.")] = 16,
    patience: Annotated[int, typer.Option(help="Epochs without improvement before it stops.")] = 3,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = "float32",
) -> None:
    """Train one vector and save it."""
    from mechtv.methods import learn as train

    check_folder(out)
    vector = train(
        opened_model(model, device, dtype),
        task_named(task, template),
        numbers(layers),
        positions="all" if positions == "all" else numbers(positions) or (-1,),
        objective=objective,  # type: ignore[arg-type]
        shots=shots,
        step_size=step_size,
        epochs=epochs,
        batch_size=batch_size,
        patience=patience,
        seed=seed,
    )
    typer.echo(vector.training_curve().to_string(index=False))
    typer.echo(f"Saved {vector.save(out)}")


@app.command()
def extract(
    method: Annotated[str, typer.Argument(help="hidden_state, function_vector, linear, ...")],
    out: Annotated[Path, typer.Option(help="The file to write, e.g. past.safetensors.")],
    model: ModelName = "smollm2-135m",
    task: TaskName = "present-past",
    template: TemplateText = None,
    layer: Annotated[
        int | None, typer.Option(help="The block; the method's own default if left out.")
    ] = None,
    option: MethodOptions = None,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = "float32",
) -> None:
    """Obtain one vector by any method and save it."""
    from mechtv.errors import InvalidInput
    from mechtv.methods.registry import check_options, method_named

    chosen, options = method_named(method), options_of(option)
    check_options(method, options)
    check_folder(out)
    if layer is not None and not chosen.has_layer:
        raise InvalidInput(f"{method!r} writes to all layers; leave out --layer.")
    where = () if layer is None else (layer,)
    opened = opened_model(model, device, dtype)
    vector = chosen.make(opened, task_named(task, template), *where, **{"seed": seed} | options)
    typer.echo(f"{vector}\nSaved {vector.save(out)}")


@app.command()
def compare(
    tasks: Annotated[list[str], typer.Argument(help="Names of `mechtv tasks`, or JSON files.")],
    out: Annotated[Path, typer.Option(help="The folder for tables, figure and cells.")] = Path(
        "out/compare"
    ),
    model: ModelName = "smollm2-135m",
    template: TemplateText = None,
    methods: Annotated[
        str | None, typer.Option(help="Methods, e.g. learned,linear; all if left out.")
    ] = None,
    layers: Layers = None,
    shots: Annotated[int, typer.Option(help="Demonstrations in context.")] = 8,
    n: N = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="A method's option, e.g. learned.epochs=5; may be repeated."),
    ] = None,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = "float32",
) -> None:
    """All methods at several layers: one table and one figure. Finished cells are kept."""
    from mechtv.plots import accuracy_of_methods
    from mechtv.study import compare_methods

    options = options_by_method(option)
    comparison = compare_methods(
        opened_model(model, device, dtype),
        [task_named(name, template) for name in tasks],
        names_in(methods),
        numbers(layers),
        shots=shots,
        n=n,
        options=options,
        folder=str(out / "cells"),
        seed=seed,
        on_finished=lambda rows: typer.echo(line_of(rows)),
    )
    write_table(comparison.table(), out / "methods.csv")
    write_table(comparison.wide(), out / "best.csv")
    page = accuracy_of_methods(comparison).to_html(include_plotlyjs=True)
    write_text(page, out / "methods.html")
    typer.echo(comparison.wide().to_string(index=False))
    typer.echo(f"Tables and the figure are in {out}")
