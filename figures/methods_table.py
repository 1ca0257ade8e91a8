"""Every method on nine tasks at four depths: accuracies, dNTP, seconds to fit and per query.

    python figures/methods_table.py --data FOLDER      (FOLDER holds sst2.train.jsonl and so on)
    python figures/methods_table.py --tasks present-past,topic

The ridge of the linear map is chosen on validation queries for each task, since the paper's 5 is
next to nothing where states have norms in the hundreds. Finished cells are kept in out/methods/;
start it again after an interruption and it goes on. Writes methods.csv (every layer),
methods_best.csv (the layer that is best on validation) and methods_correlation.csv to
figures/results.
"""

from pathlib import Path

import typer
from ridges import RIDGES, linear_maps

import mechtv
from mechtv.evaluation.scoring import Scorer
from mechtv.files import write_whole
from mechtv.forward import keep_at_most
from mechtv.study import dntp_accuracy_correlation
from mechtv.study.store import Store, key_of

WORDS = "present-past,singular-plural,capitalize,country-capital,antonym,sentiment"
TEXTS = ("sst2", "trec", "ag-news")
SHOTS = 8
KEPT = 6 * 2**30  # bytes of prefixes: news of some hundred tokens take more than the usual 1 GiB

# Texts are some ten times as long as words, so fewer of them are read.
OPTIONS = {
    "words": {
        "i2cl": {"epochs": 30},
        "linear": {"shots": SHOTS, "n": 128},
        "learned": {"batch_size": 32, "n_train": 300, "n_validation": 100},
        "learned-dntp": {"batch_size": 32, "n_train": 300, "n_validation": 100},
    },
    "texts": {
        "hidden_state": {"shots": 5, "n": 32},
        "function_vector": {"shots": 5, "n": 50, "n_shuffled": 25},
        "i2cl": {"epochs": 20},
        "linear": {"shots": SHOTS, "n": 96},
        "learned": {"batch_size": 32, "epochs": 6, "n_train": 200, "n_validation": 100},
        "learned-dntp": {
            "batch_size": 32,
            "epochs": 6,
            "n_train": 100,
            "n_validation": 50,
            "icl_shots": 4,
        },
    },
}


def main(
    data: str | None = None,
    tasks: str = "",
    n: int = 100,
    seed: int = 0,
    out: Path = Path("out/methods"),
    results: Path = Path(__file__).parent / "results",
) -> None:
    model = mechtv.open_model()
    names = tasks.split(",") if tasks else [*WORDS.split(","), *(TEXTS if data else ())]
    parts = []
    for name in names:
        kind = "texts" if name in TEXTS else "words"
        task = mechtv.get_task(name, data=data if name in TEXTS else None)
        own = {method: dict(options) for method, options in OPTIONS[kind].items()}
        own["linear"]["ridge"] = _ridge(model, task, own["linear"], seed, out)
        splits = task.splits(seed)
        for method in ("learned", "learned-dntp"):
            most = {"n_train": len(splits.train), "n_validation": len(splits.validation)}
            own[method] |= {size: min(own[method][size], n) for size, n in most.items()}
        parts.append(
            mechtv.compare_methods(
                model,
                [task],
                shots=SHOTS,
                n=n,
                n_validation=n,
                options=own,
                folder=str(out),
                seed=seed,
                on_finished=lambda rows: typer.echo(
                    f"{rows[0]['task']} {rows[0]['method']} {rows[0]['layer']}: "
                    + "; ".join(f"{r['score']} {r['value']:.3f}" for r in rows[:6])
                ),
            )
        )
        whole = mechtv.MethodComparison.of(*parts)
        tables = {
            "methods": whole.table(),
            "methods_best": whole.wide(),
            "methods_correlation": dntp_accuracy_correlation(whole),
        }
        for file, table in tables.items():
            write_whole(results / f"{file}.csv", table.to_csv(index=False).encode())


def _ridge(model, task, options, seed: int, out: Path) -> float:
    """The ridge whose map at the last layer is nearest to in-context on validation queries."""
    store = Store(out)
    key = key_of(
        model, task, method="ridge", options=options, shots=SHOTS, ridges=RIDGES, seed=seed
    )
    rows = store.rows(key)
    if rows is None:
        n = min(48, len(task.splits(seed).validation))
        scorer = Scorer(model, task, shots=SHOTS, split="validation", n=n, seed=seed)
        rows = []
        for ridge, vector in linear_maps(model, task, seed=seed, **options).items():
            _, vocabulary = scorer.score("linear", vector).divergences
            rows.append({"ridge": ridge, "dntp": vocabulary.value})
        store.keep(key, rows)
    return min(rows, key=lambda row: row["dntp"])["ridge"]


if __name__ == "__main__":
    with keep_at_most(KEPT):
        typer.run(main)
