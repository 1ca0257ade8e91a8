"""What the figure scripts share: their options, cells that are kept, and the files they leave.

A script says which cells it needs, how their tables are drawn, and what the paper claims; `run`
does the rest. Finished cells lie in OUT/cells and OUT/studies: they are shared by all scripts, and
an interrupted script goes on where it was.
"""

import ast
import hashlib
import inspect
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import plotly.graph_objects as go
import typer

import mechtv
from mechtv.errors import InvalidInput
from mechtv.files import made_folder, write_whole
from mechtv.forward import keep_at_most
from mechtv.models import describe
from mechtv.overview import evenly_spread
from mechtv.plots.room import LINE_HEIGHT
from mechtv.progress import progress_bar
from mechtv.study import Study, run_study
from mechtv.study.averages import over_seeds
from mechtv.study.code import code_version, meaning
from mechtv.study.store import VECTOR, Store, key_of
from mechtv.tasks.sources import TEXT_SOURCES

RESULTS = Path(__file__).parent / "results"
DRAWING = {"draw", "said", "FIGURE"}  # of a script: they change no number
KEPT = 4 * 2**30  # bytes of prompts' prefixes; texts take more than the usual 1 GiB
TRAINING = {"epochs": 10, "batch_size": 32, "n_train": 150, "n_validation": 60}
QUICK_TRAINING = {"epochs": 4, "batch_size": 32, "n_train": 64, "n_validation": 32}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a script was asked for.

    Args:
        n: test queries of a task, at most; see `size`.
        data: the folder of local files of the papers' data sets; the hub if None.
    """

    model_name: str
    tasks: tuple[str, ...]
    seeds: tuple[int, ...]
    n: int
    quick: bool
    data: Path | None
    out: Path

    @property
    def model(self) -> Any:
        """The opened model, one at a time."""
        return opened(self.model_name)

    @property
    def training(self) -> dict[str, int]:
        """How vectors are learned."""
        return QUICK_TRAINING if self.quick else TRAINING

    @property
    def depths(self) -> tuple[int, ...]:
        """Early, middle and late injection."""
        n_layers = self.model.cfg.n_layers
        return tuple(dict.fromkeys(round(share * n_layers) for share in (0.25, 0.5, 0.75)))

    def layers(self, few: int, many: int) -> tuple[int, ...]:
        """So many layers of the model, evenly spread: few when it has to be quick."""
        return evenly_spread(self.model.cfg.n_layers, few if self.quick else many)

    def task(self, name: str) -> mechtv.Task:
        """A task by name."""
        return mechtv.get_task(name, data=self.data if name in TEXT_SOURCES else None)

    def size(self, task: mechtv.Task, seed: int, split: str = "test") -> int:
        """How many queries of a split: n, or all where there are fewer."""
        return min(self.n, len(getattr(task.splits(seed), split)))

    def learned(self, task: mechtv.Task, layer: int | list[int], seed: int, **options: Any) -> Any:
        """A learned vector, trained once for all scripts."""
        settings = fitting(task, self.training) | options
        key = key_of(self.model, task, method="learned", layer=layer, seed=seed, options=settings)
        store = Store(self.out / "cells")
        if store.rows(key) is None:
            vector = mechtv.learn(self.model, task, layer, seed=seed, progress=False, **settings)
            store.keep(key, [{"n_parameters": vector.n_parameters}], vector)
        return mechtv.TaskVector.load(store.path(key, VECTOR))

    def table(self, cells: "Sequence[Cell]") -> pd.DataFrame:
        """The cells' tables in one, those that are there already read."""
        store, tables = Store(self.out / "cells"), []
        with progress_bar(title="cells", total=len(cells)) as bar:
            for cell in cells:
                key = key_of(
                    self.model,
                    cell.task,
                    method=cell.compute.__name__,
                    settings=cell.settings | {"n": self.n, "quick": self.quick},
                    training=self.training,
                    beside={task.name: task.checksum() for task in cell.beside},
                    source=_source(cell.compute),
                    analysis=code_version("analysis")["code"],
                )
                rows = store.rows(key)
                if rows is None:
                    rows = records(cell.compute(self, cell.task, **cell.settings))
                    store.keep(key, rows)
                about = {"task": cell.task.name} | cell.settings
                tables.append(pd.DataFrame(rows).assign(**_scalars(about)))
                bar.update()
        return pd.concat(tables, ignore_index=True)

    def study(self, *, tasks: Sequence[str] = (), **grid: Any) -> pd.DataFrame:
        """The table of a grid of methods, over this setup's model, seeds, and tasks or some."""
        chosen = [
            {"name": name, "data": str(self.data)} if self.data and name in TEXT_SOURCES else name
            for name in tasks or self.tasks
        ]
        study = Study(
            **{
                "name": "figures",
                "models": [self.model_name],
                "tasks": chosen,
                "seeds": self.seeds,
                "n": self.n,
                "n_validation": self.n,
            }
            | grid
        )
        results = run_study(study, self.out / "studies", retry_failed=True)
        if results.notices():
            raise InvalidInput(" ".join(results.notices()))
        return results.table()


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Something to compute for one task: `compute(setup, task, **settings)` gives a table.

    Args:
        settings: plain values; they are columns of the table too.
        beside: other tasks that it takes.
    """

    compute: Callable[..., pd.DataFrame]
    task: mechtv.Task
    settings: dict[str, Any] = field(default_factory=dict)
    beside: tuple[mechtv.Task, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure or table of a paper.

    Args:
        name: of its files, such as `l01_accuracy_by_layer`.
        claim: what the paper says, in a sentence.
        tasks, quick_tasks: which are taken if none are asked for.
        texts: data sets of the papers, taken too by a full run that is told where they lie.
        compute: gives its table.
        draw: draws the table.
        said: sentences about what the table says.
    """

    name: str
    claim: str
    tasks: tuple[str, ...]
    quick_tasks: tuple[str, ...]
    compute: Callable[[Setup], pd.DataFrame]
    draw: Callable[[pd.DataFrame], go.Figure]
    said: Callable[[pd.DataFrame], Sequence[str]] = lambda table: ()
    texts: tuple[str, ...] = ()
    n: int = 100
    quick_n: int = 24


def main(figure: Figure) -> None:
    """Run a script by its options."""

    def command(
        model: str = "smollm2-135m",
        tasks: Annotated[str, typer.Option(help="Names, parted by commas.")] = "",
        seeds: Annotated[str, typer.Option(help="Numbers, parted by commas.")] = "0",
        quick: Annotated[bool, typer.Option("--quick", help="Few tasks, layers, queries.")] = False,
        n: Annotated[int | None, typer.Option(help="Test queries of a task, at most.")] = None,
        data: Annotated[
            Path | None, typer.Option(help="The folder of the papers' data sets; else the hub.")
        ] = None,
        out: Annotated[Path, typer.Option(help="The folder of cells and pages.")] = Path(
            "out/figures"
        ),
    ) -> None:
        run(figure, setup_of(figure, model, tasks, seeds, quick=quick, n=n, data=data, out=out))

    command.__doc__ = figure.claim
    typer.run(command)


def setup_of(
    figure: Figure,
    model: str,
    tasks: str = "",
    seeds: str = "0",
    *,
    quick: bool,
    n: int | None = None,
    data: Path | None,
    out: Path,
) -> Setup:
    """What the options of a script mean for its figure."""
    in_full = figure.tasks + (figure.texts if data else ())
    usual = figure.quick_tasks if quick else in_full
    return Setup(
        model_name=model,
        tasks=tuple(tasks.split(",")) if tasks else usual,
        seeds=tuple(int(seed) for seed in seeds.split(",")),
        n=n or (figure.quick_n if quick else figure.n),
        quick=quick,
        data=data,
        out=out,
    )


def run(figure: Figure, setup: Setup) -> pd.DataFrame:
    """Compute a figure's table, draw it, and write both with where they come from.

    OUT gets NAME.html, .png, .svg, .csv and .json; of a run that is not quick the last three go to
    figures/results too.
    """
    began = time.monotonic()
    made_folder(setup.out)
    with keep_at_most(KEPT):
        table = figure.compute(setup)
    drawn = under_title(figure.draw(table), setup)
    for ending in ("html", "png", "svg"):
        mechtv.plots.save(drawn, setup.out / f"{figure.name}.{ending}")
    origin = provenance(figure, setup, table, time.monotonic() - began)
    if not setup.quick:
        picture = setup.out / f"{figure.name}.svg"
        write_whole(RESULTS / picture.name, picture.read_bytes())
    for folder in (setup.out,) if setup.quick else (setup.out, RESULTS):
        write_whole(folder / f"{figure.name}.csv", table.to_csv(index=False).encode())
        write_whole(folder / f"{figure.name}.json", json.dumps(origin, indent=1).encode())
    for sentence in origin["said"]:
        typer.echo(sentence)
    typer.echo(f"Saved {setup.out / figure.name}.html, .png, .svg, .csv, .json")
    return table


def under_title(drawn: go.Figure, setup: Setup) -> go.Figure:
    """The figure with a line more below its title: what of the setup it does not say already."""
    text = drawn.layout.title.subtitle.text
    model = setup.model_name.rstrip("/").rpartition("/")[2]
    about = [
        name
        for name in (model, *(setup.tasks if len(setup.tasks) == 1 else ()))
        if name not in text
    ]
    about += [] if "queries" in text else [f"at most {setup.n} test queries a task"]
    about += [f"seeds {', '.join(map(str, setup.seeds))}"] if len(setup.seeds) > 1 else []
    about += ["quick run"] if setup.quick else []
    if not about:
        return drawn
    drawn.layout.title.subtitle.text = f"{' · '.join(about)}<br>{text}"
    above = (drawn.layout.margin.t or 90) + LINE_HEIGHT
    return drawn.update_layout(margin_t=above, height=(drawn.layout.height or 500) + LINE_HEIGHT)


def provenance(figure: Figure, setup: Setup, table: pd.DataFrame, seconds: float) -> dict[str, Any]:
    """Everything that a table comes from."""
    asked = asdict(setup)
    return {
        "figure": figure.name,
        "claim": figure.claim,
        "said": list(figure.said(table)),
        "settings": {name: v for name, v in asked.items() if not isinstance(v, Path)},
        "model": asdict(describe(setup.model)),
        "versions": code_version("analysis"),
        "python": platform.python_version(),
        "machine": {"processor": platform.machine(), "cores": os.cpu_count()},
        "command": " ".join(["python", *map(_relative, sys.argv)]),
        "date": datetime.now(UTC).date().isoformat(),
        "seconds": round(seconds, 1),
        "test_queries": {
            f"{name}, seed {seed}": _ids(setup, setup.task(name), seed)
            for name in setup.tasks
            for seed in setup.seeds
        },
    }


def fitting(task: mechtv.Task, options: Mapping[str, Any]) -> dict[str, Any]:
    """A training's options, no more examples than the task has."""
    splits = task.splits(0)
    most = {"n_train": len(splits.train), "n_validation": len(splits.validation)}
    return {name: min(v, most[name]) if name in most else v for name, v in options.items()}


def pooled(table: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """The mean over seeds of `value`, `low` and `high`, and the smallest `n`.

    The ends are right or too wide, since seeds share queries only in part; unknown if one is.
    """
    how = {"value": "mean", "low": _mean_of_all, "high": _mean_of_all, "n": "min"}
    known = {name: how[name] for name in how if name in table}
    return table.groupby(list(by), sort=False, dropna=False, as_index=False).agg(known)


def averaged(table: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """The mean of `value` over what is not alike (tasks, layers): without an interval."""
    return pooled(table, by)[[*by, "value"]]


def _mean_of_all(values: pd.Series) -> float:
    return values.mean(skipna=False)


def comparison_of(table: pd.DataFrame) -> mechtv.MethodComparison:
    """A study's table as a comparison of methods, over its seeds if there are several."""
    several = table["seed"].nunique() > 1
    return mechtv.MethodComparison(rows=over_seeds(table) if several else table)


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """A table as rows of plain values; what is not known is None."""
    return table.astype(object).where(table.notna(), None).to_dict("records")


@lru_cache(maxsize=1)
def opened(name: str) -> Any:
    """The model, which stays open until another is asked for."""
    return mechtv.open_model(name)


def _source(function: Callable[..., Any]) -> str:
    """A checksum of what a function does with all that stands beside it, but for the drawing."""
    here = Path(__file__).parent
    files = {Path(inspect.getfile(function)), here / "cells.py", here / "ridges.py"}
    files.add(Path(inspect.getfile(mechtv.flexibility)))
    text = "\n".join(_computing(file) for file in sorted(files))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@lru_cache
def _computing(file: Path) -> str:
    tree = ast.parse(file.read_text())
    tree.body = [node for node in tree.body if not DRAWING & _defined(node)]
    return meaning(ast.unparse(tree))


def _defined(node: ast.stmt) -> set[str]:
    """The names that a statement gives a value."""
    if isinstance(node, ast.FunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _scalars(settings: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in settings.items() if isinstance(v, str | int | float)}


def _relative(word: str) -> str:
    """A word of the command, without what only this machine knows."""
    path, here = Path(word), Path.cwd()
    if not path.is_absolute():
        return word
    return str(path.relative_to(here)) if here in path.parents else "FOLDER"


def _ids(setup: Setup, task: mechtv.Task, seed: int) -> str:
    """The places of the test queries among the task's examples."""
    every = {e.key: place for place, e in enumerate(task.examples + task.test_examples)}
    asked = task.split("test", n=setup.size(task, seed), seed=seed)
    return " ".join(str(every[example.key]) for example in asked)
