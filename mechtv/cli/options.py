"""The app, and the options that several commands have."""

from typing import Annotated

import typer

app = typer.Typer(
    help="Train, extract, score and explain the task vectors of language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

ModelName = Annotated[
    str, typer.Option("--model", help="Bundled name, hub id, folder or GGUF file.")
]
TaskName = Annotated[str, typer.Option("--task", help="A name of `mechtv tasks`, or a JSON file.")]
TemplateText = Annotated[
    str | None,
    typer.Option("--template", help='A name, or a text like "Q: {input}\\nA: {answer}".'),
]
Layers = Annotated[
    str | None,
    typer.Option("--layers", help="Blocks, e.g. 4,11,19 (from 0). Four depths if left out."),
]
MethodOptions = Annotated[
    list[str] | None,
    typer.Option("--option", help="An option of the method, e.g. shots=5; may be repeated."),
]
N = Annotated[int | None, typer.Option("--n", help="How many test queries; all if left out.")]
Seed = Annotated[int, typer.Option(help="Fixes splits, demonstrations and training.")]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1, mps; the best one if left out.")
]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")]
