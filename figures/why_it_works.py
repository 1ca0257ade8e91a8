"""Why learned vectors work: every analysis, on several tasks, depths and models.

    python figures/why_it_works.py --data FOLDER         (FOLDER holds sst2.train.jsonl and so on)
    python figures/why_it_works.py --models gemma-3-270m --tasks present-past,singular-plural

For each model, task and depth a vector is learned and explained. What is finished is kept in
out/why: the vector, its page, the tables; start it again after an interruption and it goes on.
Writes one table a part, why_PART.csv, to figures/results; rows there of other models, tasks and
depths stay. `why_claims.py` reads them.
"""

from dataclasses import asdict
from pathlib import Path

import pandas as pd
import typer

import mechtv
from mechtv.files import write_whole
from mechtv.forward import keep_at_most
from mechtv.report import write_explanation
from mechtv.study.explain import PARTS, Explanation

TASKS = "present-past,singular-plural,sst2,trec"
TEXTS = ("sst2", "trec", "ag-news")
DEPTHS = (0.25, 0.5, 0.75)
KEPT = 6 * 2**30  # bytes of prefixes
LARGE = {"head_maps", "lens", "diagnostics"}  # whole in out/why alone
CELL = ["model", "task", "vector_layer"]
TRAINING = {"epochs": 10, "batch_size": 32}


def main(
    data: str | None = None,
    tasks: str = TASKS,
    models: str = "smollm2-135m",
    n: int = 100,
    seed: int = 0,
    out: Path = Path("out/why"),
    results: Path = Path(__file__).parent / "results",
) -> None:
    for name in models.split(","):
        model = mechtv.open_model(name)
        for task_name in tasks.split(","):
            task = mechtv.get_task(task_name, data=data if task_name in TEXTS else None)
            for depth in DEPTHS:
                layer = round(depth * model.cfg.n_layers)
                folder = out / name / f"{task_name}-{layer}"
                if not (folder / "evaluation.csv").exists():
                    with keep_at_most(KEPT):
                        _explain(model, task, layer, folder, n, seed)
                _gather(out, results)


def _explain(model, task, layer: int, folder: Path, n: int, seed: int) -> None:
    splits = task.splits(seed)
    sizes = {"n_train": min(300, len(splits.train)), "n_validation": min(n, len(splits.validation))}
    (folder / "tables").mkdir(parents=True, exist_ok=True)
    vector = mechtv.learn(model, task, layer=layer, seed=seed, **TRAINING, **sizes)
    vector.save(folder / "vector.safetensors")
    size = min(n, len(splits.test))

    def keep(found) -> None:
        _write(found.table(), folder / "tables" / f"{found.name}.csv")
        typer.echo(f"{task.name} {layer} {found.name}: {found.seconds:.0f} s {found.refusal}")

    explanation = mechtv.explain(model, task, vector, n=size, seed=seed, on_finished=keep)
    write_explanation(explanation, folder / "explanation.html")
    for part, table in _summaries(explanation).items():
        _write(table.assign(vector_layer=layer), folder / f"{part}.csv")
    in_context = mechtv.evaluate(model, task, shots=8, n=size, seed=seed).table()
    scores = pd.concat([explanation.tables()["evaluation"], in_context], ignore_index=True)
    _write(scores.assign(vector_layer=layer), folder / "evaluation.csv")


def _summaries(e: Explanation) -> dict[str, pd.DataFrame]:
    """The rows of each part that the papers' claims are about."""
    found = {"seconds": e.table().assign(task=e.task.name, model=e.model.name)}
    done = {finding.name: finding.result for finding in e.findings if not finding.refusal}
    for part, result in done.items():
        found[part] = result.table()
    if "readers" in done:
        found["readers"] = done["readers"].effects()
    if "decomposition" in done:
        found["decomposition"] = done["decomposition"].by_kind()
    if "heads" in done:
        saliency, about = done["heads"].saliency, {"task": e.task.name, "model": e.model.name}
        agreement = asdict(saliency.compare(done["heads"].ablation))
        key_heads = {"key_heads": str(saliency.top(0.1))}
        found["heads"] = pd.DataFrame([about | key_heads | agreement])
        found["histogram"] = saliency.histogram(0.1)
    if "attention" in done:
        found["attention"] = found["attention"][found["attention"]["head"].isna()]
    return {part: table for part, table in found.items() if part not in LARGE}


def _gather(out: Path, results: Path) -> None:
    """All finished cells as one table a part, with what the table holds of other cells."""
    for part in ("evaluation", "seconds", "histogram", *(set(PARTS) - LARGE)):
        cells = [pd.read_csv(file) for file in sorted(out.glob(f"*/*/{part}.csv"))]
        if cells:
            file = results / f"why_{part}.csv"
            before = [pd.read_csv(file)] if file.exists() else []
            _write(_latest([*before, *cells]), file)


def _latest(tables: list[pd.DataFrame]) -> pd.DataFrame:
    """The tables in one; of a cell that stands in several, the last one's rows."""
    numbered = pd.concat([t.assign(_table=i) for i, t in enumerate(tables)], ignore_index=True)
    newest = numbered.groupby(CELL, sort=False)["_table"].transform("max")
    kept = numbered[numbered["_table"] == newest].drop(columns="_table")
    return kept.sort_values(CELL, kind="stable")


def _write(table: pd.DataFrame, path: Path) -> None:
    write_whole(path, table.to_csv(index=False).encode())


if __name__ == "__main__":
    typer.run(main)
